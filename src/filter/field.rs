//! Conditions on a field of the full document, and which values they take: those whose comparison is the same here and
//! on every server.

use bson::Bson;

use super::{Filter, Node};

/// A field of the full document, waiting for its condition; [`Filter::field`] makes it.
///
/// The conditions are MongoDB's. A path leads through arrays to every element, and to one element by its index. A
/// condition holds when any of the values it leads to meets it, an array's elements and the array itself alike.
/// Values of different types are neither equal nor ordered; numbers are one type.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "a field alone is no condition"]
pub struct Field {
    pub(super) path: String,
}

/// What is asked of the values at a path.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Test {
    Eq(Bson),
    In(Vec<Bson>),
    Exists,
    Gt(Bson),
    Gte(Bson),
    Lt(Bson),
    Lte(Bson),
}

impl Field {
    /// Equal to a value; `null` is equal to a missing field too. Documents are equal with their fields in order.
    pub fn eq(self, value: impl Into<Bson>) -> Filter {
        self.is(Test::Eq(value.into()))
    }

    /// No value there is equal: the opposite of [`eq`](Self::eq), so a missing field passes.
    pub fn ne(self, value: impl Into<Bson>) -> Filter {
        self.eq(value).not()
    }

    /// Equal to one of these values; to none when there are none.
    pub fn is_in<V: Into<Bson>>(self, values: impl IntoIterator<Item = V>) -> Filter {
        self.is(Test::In(values.into_iter().map(Into::into).collect()))
    }

    /// With `true` that the field is there, be it `null`; with `false` that it is not.
    pub fn exists(self, there: bool) -> Filter {
        let exists = self.is(Test::Exists);
        if there { exists } else { exists.not() }
    }

    /// Greater than a value of the same type.
    pub fn gt(self, value: impl Into<Bson>) -> Filter {
        self.is(Test::Gt(value.into()))
    }

    /// Greater than a value of the same type, or equal to it.
    pub fn gte(self, value: impl Into<Bson>) -> Filter {
        self.is(Test::Gte(value.into()))
    }

    /// Less than a value of the same type.
    pub fn lt(self, value: impl Into<Bson>) -> Filter {
        self.is(Test::Lt(value.into()))
    }

    /// Less than a value of the same type, or equal to it.
    pub fn lte(self, value: impl Into<Bson>) -> Filter {
        self.is(Test::Lte(value.into()))
    }

    fn is(self, test: Test) -> Filter {
        Filter { node: Node::Field { path: self.path, test } }
    }
}

impl Test {
    pub(super) fn validate(&self, path: &str) -> Result<(), String> {
        if path.is_empty() || path.contains('\0') || path.split('.').any(str::is_empty) {
            return Err(format!("{path:?} is no path of a field"));
        }
        let refused = match self {
            Self::Exists => None,
            Self::Eq(value) => (!has_equality(value)).then_some(("compared with", value)),
            Self::In(values) => values.iter().find(|value| !has_equality(value)).map(|value| ("compared with", value)),
            Self::Gt(value) | Self::Gte(value) | Self::Lt(value) | Self::Lte(value) => {
                (!has_order(value)).then_some(("ordered against", value))
            }
        };
        match refused {
            Some((what, value)) => Err(format!("field {path:?} cannot be {what} a {:?}", value.element_type())),
            None => Ok(()),
        }
    }
}

/// Regular expressions match instead of being equal; the rest are types of long ago, whose rules differ by version.
fn has_equality(value: &Bson) -> bool {
    match value {
        Bson::Null => true,
        // No name in BSON holds a zero byte: such a document cannot be sent.
        Bson::Document(document) => document.iter().all(|(name, value)| !name.contains('\0') && has_equality(value)),
        Bson::Array(values) => values.iter().all(has_equality),
        value => has_order(value),
    }
}

fn has_order(value: &Bson) -> bool {
    matches!(
        value,
        Bson::Double(_)
            | Bson::Int32(_)
            | Bson::Int64(_)
            | Bson::Decimal128(_)
            | Bson::String(_)
            | Bson::Boolean(_)
            | Bson::DateTime(_)
            | Bson::Timestamp(_)
            | Bson::ObjectId(_)
            | Bson::Binary(_)
    )
}
