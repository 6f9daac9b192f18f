//! Which events a subscription reads: one value with an evaluation in memory and a pipeline for the server. It opens
//! nothing and sends nothing; models do.

mod compile;
mod field;
mod matches;
mod number;
mod value;

use bson::Document;

pub use self::field::Field;
use self::field::Test;
use crate::error::SubscribeError;
use crate::event::Operation;
use crate::ids::Namespace;

/// Which events a subscription reads. Default: every one.
///
/// A condition on a [`field`](Self::field), negated or not, holds only for events that carry a full document: a delete
/// never meets one, and an update only when the model looks its document up. An `invalidate` passes every filter.
///
/// What a filter leaves out is not delivered and not missed: the position moves on over it. A wider filter on a stored
/// position sees nothing of what lies before it.
///
/// ```
/// use mongosub::{ChangeEvent, Filter, Operation::{Insert, Update}, bson::doc, memory};
///
/// let paid = Filter::operations([Insert, Update]).and(Filter::field("status").eq("paid"));
/// let event: ChangeEvent = memory::insert(1, doc! { "status": "paid" }).into();
/// assert!(paid.matches(&event)?);
/// assert!(!paid.not().matches(&event)?);
/// # Ok::<(), mongosub::DecodeError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Filter {
    node: Node,
}

#[derive(Debug, Clone, Default, PartialEq)]
enum Node {
    #[default]
    All,
    Operations(Vec<Operation>),
    Namespaces(Vec<Namespace>),
    Field {
        path: String,
        test: Test,
    },
    And(Vec<Node>),
    Or(Vec<Node>),
    Not(Box<Node>),
    Pipeline(Vec<Document>),
}

impl Filter {
    /// Events of these operations; of none when there are none.
    pub fn operations(operations: impl IntoIterator<Item = Operation>) -> Self {
        Self { node: Node::Operations(operations.into_iter().collect()) }
    }

    /// Events in these collections; of none when there are none. A change of a whole database is in no collection, a
    /// rename is in the one renamed away.
    pub fn namespaces(namespaces: impl IntoIterator<Item = Namespace>) -> Self {
        Self { node: Node::Namespaces(namespaces.into_iter().collect()) }
    }

    /// A condition on a field of the full document, by its dotted path: `customer.address.city`, `lines.0.sku`.
    pub fn field(path: impl Into<String>) -> Field {
        Field { path: path.into() }
    }

    /// Stages of the user's own, placed behind `$changeStream`. A server alone evaluates them: models without one
    /// refuse the filter. They must not take `_id` away, and they should pass `invalidate`, or the end of the stream
    /// goes unseen.
    ///
    /// It can be combined by [`and`](Self::and), in which case the stages of both follow each other, and by nothing
    /// else.
    pub fn pipeline(stages: impl IntoIterator<Item = Document>) -> Self {
        Self { node: Node::Pipeline(stages.into_iter().collect()) }
    }

    /// Events that pass both.
    pub fn and(self, other: Self) -> Self {
        let node = match (self.node, other.node) {
            (Node::All, node) | (node, Node::All) => node,
            (Node::And(mut all), Node::And(more)) => {
                all.extend(more);
                Node::And(all)
            }
            (Node::And(mut all), one) => {
                all.push(one);
                Node::And(all)
            }
            (one, other) => Node::And(vec![one, other]),
        };
        Self { node }
    }

    /// Events that pass either.
    pub fn or(self, other: Self) -> Self {
        let node = match (self.node, other.node) {
            (Node::All, _) | (_, Node::All) => Node::All,
            (Node::Or(mut all), one) => {
                all.push(one);
                Node::Or(all)
            }
            (one, other) => Node::Or(vec![one, other]),
        };
        Self { node }
    }

    /// Events that do not pass. A negated condition on a field still holds only for events that carry a full document.
    #[allow(clippy::should_implement_trait, reason = "a word in a row of words; `!` at the front is overlooked")]
    pub fn not(self) -> Self {
        let node = match self.node {
            Node::Not(node) => *node,
            node => Node::Not(Box::new(node)),
        };
        Self { node }
    }

    /// Whether only a server can evaluate it: it has a [`pipeline`](Self::pipeline) in it.
    pub fn is_raw_pipeline(&self) -> bool {
        self.node.any(&|node| matches!(node, Node::Pipeline(_)))
    }

    /// Refuses what no model can serve: a path or a value that cannot be compared, a pipeline under `or` or `not`.
    ///
    /// # Errors
    /// [`SubscribeError::Config`] naming what is wrong.
    pub fn validate(&self) -> Result<(), SubscribeError> {
        self.node.validate(true).map_err(|message| SubscribeError::Config { field: "filter", message })
    }
}

impl Node {
    fn any(&self, found: &dyn Fn(&Self) -> bool) -> bool {
        found(self)
            || match self {
                Self::And(nodes) | Self::Or(nodes) => nodes.iter().any(|node| node.any(found)),
                Self::Not(node) => node.any(found),
                _ => false,
            }
    }

    /// `outermost`: nothing but `and` stands around it.
    fn validate(&self, outermost: bool) -> Result<(), String> {
        match self {
            Self::Field { path, test } => test.validate(path),
            Self::And(nodes) => nodes.iter().try_for_each(|node| node.validate(outermost)),
            Self::Or(nodes) => nodes.iter().try_for_each(|node| node.validate(false)),
            Self::Not(node) => node.validate(false),
            Self::Pipeline(_) if !outermost => Err("a pipeline can be combined by `and` only".into()),
            _ => Ok(()),
        }
    }
}
