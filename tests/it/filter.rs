//! Filters evaluated in memory; the same table of cases is held against a server elsewhere.

use mongosub::Operation::{Delete, Insert, Update};
use mongosub::bson::{Bson, Regex, doc};
use mongosub::memory::{self, MemoryModel};
use mongosub::{ChangeEvent, Field, Filter, Namespace, Operation, Plan, SubscribeError, SubscriptionModel};

#[path = "../support/filter_cases.rs"]
mod filter_cases;

#[test]
fn every_case_of_the_table_is_evaluated_as_a_server_does() {
    let mut wrong = Vec::new();
    for case in filter_cases::cases() {
        case.filter.validate().unwrap();
        let found = case.filter.matches(&case.event()).unwrap();
        if found != case.expected {
            wrong.push(format!("{}: {:?} gives {found}", case.name, case.change));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_invalidate_passes_every_filter() {
    let invalidate: ChangeEvent = memory::event(Operation::Invalidate).without("ns").into();
    for filter in [
        Filter::default(),
        Filter::default().not(),
        Filter::operations([Insert]),
        Filter::namespaces([]),
        Filter::field("a").eq(1),
    ] {
        assert!(filter.matches(&invalidate).unwrap(), "{filter:?}");
    }
}

#[test]
fn a_filter_compiles_to_one_match_with_every_field_bound_to_a_full_document() {
    assert!(Filter::default().stages().is_empty());
    let object = || doc! { "$type": "object" };
    let paid = || Filter::field("status").eq("paid");
    for (filter, condition) in [
        (Filter::operations([Insert, Update]), doc! { "operationType": { "$in": ["insert", "update"] } }),
        (paid(), doc! { "fullDocument": object(), "fullDocument.status": { "$eq": "paid" } }),
        (paid().not(), doc! { "fullDocument": object(), "fullDocument.status": { "$not": { "$eq": "paid" } } }),
        (
            Filter::field("a.b").exists(false),
            doc! { "fullDocument": object(), "fullDocument.a.b": { "$exists": false } },
        ),
        (
            Filter::namespaces([Namespace::new("d", "a"), Namespace::new("d", "b")]),
            doc! { "ns.db": "d", "ns.coll": { "$in": ["a", "b"] } },
        ),
        (
            Filter::operations([Insert]).and(paid()).not(),
            doc! { "$or": [
                { "operationType": { "$nin": ["insert"] } },
                { "fullDocument": object(), "fullDocument.status": { "$not": { "$eq": "paid" } } },
            ] },
        ),
    ] {
        assert_eq!(filter.stages(), [doc! { "$match": condition }], "{filter:?}");
    }
}

#[test]
fn a_pipeline_keeps_its_place_between_conditions_and_is_for_servers_alone() {
    let project = doc! { "$project": { "fullDocument.secret": 0 } };
    let filter = Filter::operations([Insert])
        .and(Filter::field("a").exists(true))
        .and(Filter::pipeline([project.clone()]))
        .and(Filter::field("b").gt(1));
    let stages = filter.stages();
    assert_eq!(stages.len(), 3);
    assert_eq!(stages[0].get_document("$match").unwrap().get_array("$and").unwrap().len(), 2);
    assert_eq!(stages[1], project);
    assert!(stages[2].contains_key("$match"));
    assert!(filter.is_raw_pipeline());
    assert!(filter.validate().is_ok());
    let event: ChangeEvent = memory::insert(1, doc! { "a": 1 }).into();
    assert!(filter.matches(&event).is_err());
    for refused in [
        Filter::pipeline([project.clone()]).not(),
        Filter::pipeline([project.clone()]).or(Filter::operations([Insert])),
        Filter::operations([Insert]).and(Filter::pipeline([project.clone()]).not()),
    ] {
        assert!(matches!(refused.validate(), Err(SubscribeError::Config { field: "filter", .. })), "{refused:?}");
    }
    let model = MemoryModel::new();
    let Err(SubscribeError::Config { field, message }) = model.check(&Plan::new(Filter::pipeline([project]))) else {
        panic!("a model without a server took a pipeline");
    };
    assert_eq!(field, "filter");
    assert!(message.contains("pipeline"), "{message}");
}

#[test]
fn what_cannot_be_compared_alike_everywhere_is_refused_with_the_field_named() {
    let regex = || Bson::RegularExpression(Regex { pattern: "a".try_into().unwrap(), options: "".try_into().unwrap() });
    let field = || Filter::field("a.b");
    for refused in [
        field().eq(regex()),
        field().is_in([Bson::Int32(1), regex()]),
        field().ne(doc! { "x": [regex()] }),
        field().eq(Bson::Undefined),
        field().eq(Bson::MinKey),
        field().gt(Bson::Null),
        field().lt(Bson::Array(vec![])),
        field().gte(doc! {}),
        field().lte(Bson::MaxKey),
        Filter::operations([Insert]).and(Filter::operations([Delete]).or(field().gt(Bson::Null)).not()),
    ] {
        let Err(SubscribeError::Config { field: "filter", message }) = refused.validate() else {
            panic!("{refused:?} was not refused");
        };
        assert!(message.contains("a.b"), "{message}");
    }
    for path in ["", ".", "a.", ".a", "a..b", "a\0b"] {
        assert!(Filter::field(path).eq(1).validate().is_err(), "{path:?}");
    }
}

#[test]
fn a_filter_needs_a_full_document_when_a_condition_can_decide_about_an_update() {
    let paid = || Filter::field("status").eq("paid");
    let here = || Filter::namespaces([Namespace::new("d", "a")]);
    for (needs, filter) in [
        (false, Filter::default()),
        (false, Filter::operations([Update])),
        (true, paid()),
        (true, paid().not()),
        (true, Filter::operations([Insert, Update]).and(paid())),
        (false, Filter::operations([Insert, Delete]).and(paid())),
        (true, Filter::operations([Insert]).or(paid())),
        (false, Filter::operations([Update]).or(paid())),
        (false, Filter::operations([Update]).not().and(paid())),
        (true, Filter::operations([Insert]).not().and(paid())),
        (true, here().and(paid())),
        (true, paid().or(here())),
        (true, here().or(Filter::operations([Insert]).and(paid()).not().and(paid()))),
        (false, here().and(Filter::operations([Insert]).and(paid()))),
        (false, Filter::operations([Update]).not().or(paid().not()).not().and(Filter::operations([Delete]))),
        (false, Filter::pipeline([doc! { "$match": { "fullDocument.a": 1 } }])),
    ] {
        assert_eq!(filter.needs_full_document(), needs, "{filter:?}");
        let plan = Plan::new(filter.clone());
        if !filter.is_raw_pipeline() {
            assert_eq!(MemoryModel::new().check(&plan) == Err(SubscribeError::FilterNeedsFullDocument), needs);
            assert!(MemoryModel::new().full_document(true).check(&plan).is_ok());
        }
    }
}

#[test]
fn the_fingerprint_follows_the_stages_alone() {
    let of = |filter| MemoryModel::new().check(&Plan::new(filter)).unwrap();
    let inserts = || Filter::operations([Insert]);
    assert_eq!(of(inserts()), of(inserts().not().not()));
    assert_ne!(of(inserts()), of(Filter::default()));
    assert_ne!(of(inserts()), of(Filter::operations([Insert, Delete])));
    let mut plan = Plan::new(inserts());
    plan.leave_out = vec![Namespace::new("d", "checkpoints")];
    assert_eq!(MemoryModel::new().check(&plan).unwrap(), of(inserts()));
}

#[test]
fn a_filter_decodes_only_what_it_asks_about() {
    let event = memory::insert(1, doc! { "good": 1, "bad": "ABCD" });
    let mut raw = ChangeEvent::from(event).bytes().to_vec();
    let at = raw.windows(4).position(|bytes| bytes == b"ABCD").unwrap();
    raw[at] = 0xFF;
    let event = ChangeEvent::new(raw.into()).unwrap();
    let field: fn(&str) -> Field = |path| Filter::field(path);
    assert!(field("good").eq(1).matches(&event).unwrap());
    assert!(field("bad").exists(true).matches(&event).is_err());
    let error = Filter::operations([Insert]).and(field("bad").eq("x")).matches(&event).unwrap_err();
    assert_eq!(error.field(), "fullDocument.bad");
    assert!(!Filter::operations([Delete]).and(field("bad").eq("x")).matches(&event).unwrap());
}
