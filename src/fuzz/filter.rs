//! Filters and pipelines made out of bytes: taken, or refused by name; and what is taken means the same in every form.

use bson::{Bson, Document, doc};
use bytes::Bytes;

use super::draw::Draw;
use crate::error::SubscribeError;
use crate::event::{ChangeEvent, Operation};
use crate::filter::Filter;
use crate::ids::Namespace;
use crate::mongo::fuzz::{behind_the_source, check_stages};

/// Two filters, an event and, now and then, bytes to break it with.
///
/// # Panics
/// When a filter is refused without a name, when one that is not cannot be sent or evaluated, and when `and`, `or`, `not`
/// or `lte` does not mean what its parts mean.
pub fn filter(bytes: &[u8]) -> bool {
    let mut draw = Draw::new(bytes);
    let (whole, event) = event(&mut draw);
    let (one, other) = (any_filter(&mut draw, 3), any_filter(&mut draw, 3));
    for filter in [&one, &other] {
        if let Err(error) = filter.validate() {
            assert!(
                matches!(&error, SubscribeError::Config { field: "filter", message } if !message.is_empty()),
                "{error:?}"
            );
            // Refused, and yet nobody's harm.
            let _ = (filter.stages(), filter.needs_full_document(), filter.matches(&event).is_ok());
            return false;
        }
        let stages = doc! { "pipeline": filter.stages() };
        assert!(stages.to_vec().is_ok(), "a filter that cannot be sent: {filter:?}");
        let _ = filter.needs_full_document();
    }
    let matches = |filter: &Filter| filter.matches(&event).ok();
    let (is_one, is_other) = (matches(&one), matches(&other));
    if !whole || one.is_raw_pipeline() || other.is_raw_pipeline() {
        return false;
    }
    let (Some(is_one), Some(is_other)) = (is_one, is_other) else { panic!("a whole event fails {one:?} or {other:?}") };
    let agrees = |what: &str, filter: Filter, expected: bool| {
        assert_eq!(matches(&filter), Some(expected), "{what} of {one:?} and {other:?} on {:?}", event.raw());
    };
    if event.operation() == Ok(Operation::Invalidate) {
        assert!(is_one && is_other, "an invalidate passes every filter");
        return true;
    }
    agrees("and", one.clone().and(other.clone()), is_one && is_other);
    agrees("or", one.clone().or(other.clone()), is_one || is_other);
    agrees("not not", one.clone().not().not(), is_one);
    let neither = matches(&one.clone().not()) == Some(true) && matches(&other.clone().not()) == Some(true);
    agrees("nor", one.clone().or(other.clone()).not(), neither);
    if let Some(value) =
        [draw.value(0)].into_iter().find(|value| Filter::field("a").lt(value.clone()).validate().is_ok())
    {
        let field = || Filter::field(["a", "a.b", "a.0"][usize::from(is_one) + usize::from(is_other)]);
        let (less, equal) = (matches(&field().lt(value.clone())), matches(&field().eq(value.clone())));
        agrees("lte", field().lte(value.clone()), less == Some(true) || equal == Some(true));
        let (more, equal) = (matches(&field().gt(value.clone())), matches(&field().is_in([value.clone()])));
        agrees("gte", field().gte(value), more == Some(true) || equal == Some(true));
    }
    true
}

/// An event, and whether it is as a server sends it.
fn event(draw: &mut Draw<'_>) -> (bool, ChangeEvent) {
    let data = "826568B1F0000000032B022C0100296E5A1004ABABABABABABABABABABABABABABABAB46645F69640064";
    let operation = ["insert", "update", "delete", "invalidate", "other"][usize::from(draw.below(5))];
    let mut document = doc! { "_id": { "_data": data }, "operationType": operation };
    if draw.below(8) > 0 {
        document.insert("ns", doc! { "db": draw.name(), "coll": draw.name() });
    }
    match draw.below(4) {
        0 => {}
        1 => drop(document.insert("fullDocument", Bson::Null)),
        _ => drop(document.insert("fullDocument", draw.document(3))),
    }
    let Ok(mut bytes) = document.to_vec() else {
        // A name that BSON cannot hold.
        return (false, ChangeEvent::from_document(&document));
    };
    let breaks = if draw.below(4) == 0 { draw.below(4) } else { 0 };
    for _ in 0..breaks {
        let at = 4 + (usize::from(draw.byte()) << 8 | usize::from(draw.byte())) % (bytes.len() - 5);
        bytes[at] ^= draw.byte();
    }
    (breaks == 0, ChangeEvent::new(Bytes::from(bytes)).expect("its outermost length is right"))
}

fn any_filter(draw: &mut Draw<'_>, depth: u8) -> Filter {
    let operation = |draw: &mut Draw<'_>| {
        [Operation::Insert, Operation::Update, Operation::Delete, Operation::Other("other".into())]
            [usize::from(draw.below(4))]
        .clone()
    };
    match draw.below(if depth == 0 { 10 } else { 16 }) {
        0 => Filter::default(),
        1 => Filter::operations((0..draw.below(3)).map(|_| operation(draw)).collect::<Vec<_>>()),
        2 => {
            Filter::namespaces((0..draw.below(3)).map(|_| Namespace::new(draw.name(), draw.name())).collect::<Vec<_>>())
        }
        3 if draw.below(4) == 0 => Filter::pipeline((0..draw.below(3)).map(|_| stage(draw)).collect::<Vec<_>>()),
        test @ 3..10 => {
            let (field, value) = (Filter::field(draw.path()), draw.value(2));
            match test {
                3 => field.eq(value),
                4 => field.is_in(draw.values(1)),
                5 => field.exists(draw.below(2) == 1),
                6 => field.gt(value),
                7 => field.gte(value),
                8 => field.lt(value),
                _ => field.lte(value),
            }
        }
        10 | 11 => any_filter(draw, depth - 1).and(any_filter(draw, depth - 1)),
        12 | 13 => any_filter(draw, depth - 1).or(any_filter(draw, depth - 1)),
        _ => any_filter(draw, depth - 1).not(),
    }
}

const STAGES: [&str; 10] = [
    "$match",
    "$project",
    "$set",
    "$addFields",
    "$unset",
    "$replaceRoot",
    "$replaceWith",
    "$redact",
    "$changeStream",
    "$changeStreamSplitLargeEvent",
];

fn stage(draw: &mut Draw<'_>) -> Document {
    match draw.below(8) {
        0 => draw.document(2),
        1 => doc! { draw.name(): draw.value(1) },
        _ => {
            let name = STAGES[usize::from(draw.below(10))];
            let argument = if draw.below(4) == 0 { draw.value(2) } else { Bson::Document(draw.document(2)) };
            doc! { name: argument }
        }
    }
}

/// A pipeline of the user's own.
///
/// # Panics
/// When it is refused without its stage being named, when a stage that is the model's own or cannot be sent is taken,
/// and when what is sent is not the same stages in the same order.
pub fn pipeline(bytes: &[u8]) -> bool {
    let mut draw = Draw::new(bytes);
    let own: Vec<Document> = (0..draw.below(5)).map(|_| stage(&mut draw)).collect();
    let filter = Filter::pipeline(own.clone());
    assert!(filter.validate().is_ok() && filter.is_raw_pipeline());
    // By its text, in which NaN equals NaN.
    assert_eq!(format!("{:?}", filter.stages()), format!("{own:?}"));
    if let Err(message) = check_stages(&own) {
        let named = (1..=own.len()).any(|stage| message.contains(&format!("stage {stage} of the pipeline")));
        assert!(named, "{message:?} for {own:?}");
        return false;
    }
    let sent = behind_the_source(&own);
    assert_eq!(sent.len(), own.len());
    for (own, sent) in own.iter().zip(&sent) {
        assert_eq!(own.keys().collect::<Vec<_>>(), sent.keys().collect::<Vec<_>>());
        assert!(own.keys().all(|name| name.starts_with('$') && !name.starts_with("$changeStream")), "{own}");
        match own.get("$match") {
            Some(condition) => assert!(sent.to_string().contains(&condition.to_string()), "{sent}"),
            None => assert_eq!(format!("{own:?}"), format!("{sent:?}")),
        }
    }
    assert!(doc! { "pipeline": &sent }.to_vec().is_ok(), "stages that cannot be sent: {own:?}");
    true
}
