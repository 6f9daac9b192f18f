//! The targets over mutations of valid inputs: as many as are named here, the same ones each time.
//!
//! `MONGOSUB_FUZZ_SEED` and `MONGOSUB_FUZZ_INPUTS` choose others and more. What was found once stands in `FINDINGS`.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bson::Document;

use super::{TARGETS, Target, plain, seeds};
use crate::event::ChangeEvent;

const SEED: u64 = 0x6D6F_6E67_6F73_7562;
const INPUTS: u64 = 8_000;

#[test]
fn a_stored_record_with_corrupt_bytes_is_refused_by_its_field_or_is_what_stands_there() {
    run("record");
}

#[test]
fn a_text_of_another_program_is_no_position_or_exactly_the_one_that_stands_there() {
    run("text");
}

#[test]
fn a_token_is_one_to_any_reader_and_sorts_and_covers_as_its_bytes_do() {
    run("token");
}

#[test]
fn of_a_reply_with_corrupt_bytes_no_event_is_skipped_and_no_position_made_up() {
    run("reply");
}

#[test]
fn every_accessor_of_an_event_with_corrupt_bytes_answers_or_fails_alone() {
    run("event");
}

#[test]
fn any_filter_is_refused_by_name_or_means_what_its_parts_mean() {
    run("filter");
}

#[test]
fn any_pipeline_is_refused_by_its_stage_or_sent_as_it_is() {
    run("pipeline");
}

/// `{ field: { a: { a: .. } } }`, as deep as is said; built from its length, without recursion.
fn nested(field: &str, depth: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let open = |bytes: &mut Vec<u8>, name: &str, levels: usize, more: usize| {
        let length = 5 + 8 * levels + more;
        bytes.extend(u32::try_from(length).unwrap().to_le_bytes());
        if levels > 0 {
            bytes.push(plain::DOCUMENT);
            bytes.extend(name.as_bytes());
            bytes.push(0);
        }
    };
    open(&mut bytes, field, depth, field.len() - 1);
    for level in (0..depth).rev() {
        open(&mut bytes, "a", level, 0);
    }
    bytes.resize(bytes.len() + depth + 1, 0);
    bytes
}

#[test]
fn what_is_nested_deeper_than_a_server_keeps_it_is_refused_and_not_the_end_of_the_process() {
    for field in ["documentKey", "fullDocument", "fullDocumentBeforeChange", "updateDescription", "lsid"] {
        for depth in [202, 5_000, 200_000] {
            attempt("a deep event", super::event, &nested(field, depth));
        }
        let deep = ChangeEvent::new(nested(field, 202).into()).unwrap();
        let answers = [deep.full_document::<Document>(), deep.document_key(), deep.full_document_before_change()];
        let errors: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.len(), usize::from(field.contains("ocument")), "{field}");
        assert!(errors.iter().all(|error| error.field() == field && error.to_string().contains("200 levels")));
    }
    let whole = ChangeEvent::new(nested("fullDocument", 60).into()).unwrap();
    assert_eq!(whole.full_document::<Document>().unwrap().unwrap().len(), 1);
    for depth in [201, 5_000, 200_000] {
        assert!(attempt("a deep field that is not ours", super::record, &nested("theirs", depth)));
        assert!(!attempt("a deep field that is ours", super::record, &nested("mongosub", depth)));
    }
}

fn number(variable: &str, usual: u64) -> u64 {
    env::var(variable).map_or(usual, |value| value.parse().expect("a number"))
}

fn run(name: &str) {
    let (_, target) = TARGETS.into_iter().find(|(target, _)| *target == name).expect("a target");
    let (seed, inputs) = (number("MONGOSUB_FUZZ_SEED", SEED), number("MONGOSUB_FUZZ_INPUTS", INPUTS));
    println!("{name}: {inputs} inputs, seed {seed}");
    for (what, input) in FINDINGS.iter().filter(|(of, ..)| *of == name).map(|(_, what, hex)| (what, unhex(hex))) {
        attempt(what, target, &input);
    }
    let seeds = seeds(name);
    let taken = seeds.iter().filter(|input| attempt("a valid input", target, input)).count();
    assert!(taken * 4 > seeds.len(), "the valid inputs are taken: {taken} of {}", seeds.len());
    let mut random = fastrand::Rng::with_seed(seed ^ name.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte)));
    let mut taken = 0;
    for number in 0..inputs {
        let input = mutated(&seeds, &mut random);
        taken += u64::from(attempt(&format!("input {number} of seed {seed}"), target, &input));
    }
    println!("{name}: {taken} were taken for valid");
    assert!((inputs / 50..inputs - inputs / 50).contains(&taken), "{taken} of {inputs} taken: nothing is tried");
}

fn attempt(what: &str, target: Target, input: &[u8]) -> bool {
    catch_unwind(AssertUnwindSafe(|| target(input)))
        .unwrap_or_else(|_| panic!("{what} breaks a property (said above): {}", plain::hex(input).to_lowercase()))
}

fn unhex(hex: &str) -> Vec<u8> {
    let (pairs, []) = hex.as_bytes().as_chunks::<2>() else { panic!("an odd number of digits") };
    pairs.iter().map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn mutated(seeds: &[Vec<u8>], random: &mut fastrand::Rng) -> Vec<u8> {
    let mut input = random.choice(seeds).expect("a seed").clone();
    for _ in 0..random.u32(1..=4) {
        if input.len() < 8 {
            break;
        }
        mutate(&mut input, seeds, random);
    }
    if random.u32(..4) > 0 {
        repair(&mut input);
    }
    input
}

/// The outermost length right again, so that what lies deeper is looked at.
fn repair(input: &mut [u8]) {
    if input.len() > 4 && input[..4].contains(&0) {
        let length = u32::try_from(input.len()).unwrap();
        input[..4].copy_from_slice(&length.to_le_bytes());
        *input.last_mut().unwrap() = 0;
    }
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut fastrand::Rng) {
    let at = random.usize(..input.len());
    let end = (at + random.usize(1..=16)).min(input.len());
    match random.u32(..12) {
        0 | 1 => input[at] ^= 1 << random.u32(..8),
        2 => input[at] = random.u8(..),
        3 => input.truncate(at.max(5)),
        4 => drop(input.drain(at..end)),
        5 => {
            let again = input[at..end].to_vec();
            input.splice(at..at, again);
        }
        // Neither ASCII nor UTF-8.
        6 => input[at..end].fill(random.choice([0xFF, 0xC3, 0x80]).unwrap()),
        // A length: most are small numbers of four bytes.
        7 | 8 => {
            let lengths: Vec<usize> = (0..input.len().saturating_sub(4))
                .filter(|at| input[at + 1..at + 4] == [0, 0, 0] && input[*at] > 0)
                .collect();
            if let Some(&at) = random.choice(&lengths) {
                let other = [
                    0,
                    1,
                    4,
                    5,
                    u32::from(input[at]) + 1,
                    u32::from(input[at]) - 1,
                    0x7FFF_FFFF,
                    0x8000_0000,
                    u32::MAX,
                ];
                input[at..at + 4].copy_from_slice(&random.choice(other).unwrap().to_le_bytes());
            }
        }
        // A type: it stands behind a zero.
        9 => {
            let types: Vec<usize> = (1..input.len()).filter(|at| input[at - 1] == 0 && input[*at] > 0).collect();
            if let Some(&at) = random.choice(&types) {
                input[at] = random
                    .choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 0xA, 0xB, 0xC, 0xD, 0xF, 0x10, 0x11, 0x12, 0x13, 0x7F])
                    .unwrap();
            }
        }
        // A field once more, of its own or of another input: a key that stands twice.
        10 => {
            let other = random.choice(seeds).unwrap();
            let fields: Vec<_> = plain::fields(other).map_while(|field| field).collect();
            if let Some(field) = random.choice(&fields) {
                let field = [&[field.kind], field.name, &[0], field.value].concat();
                let end = input.len() - 1;
                let at = if random.bool() { end } else { 4 };
                input.splice(at..at, field);
                repair(input);
            }
        }
        _ => {
            let other = random.choice(seeds).unwrap();
            let from = random.usize(..other.len());
            let until = (from + random.usize(1..=32)).min(other.len());
            input.splice(at..end, other[from..until].iter().copied());
        }
    }
}

/// `(target, what it was, input)`
const FINDINGS: &[(&str, &str, &str)] = &[
    (
        "record",
        "a record with two parts of ours, of which the last one was read",
        "ca000000025f696400020000006100036d6f6e676f737562005300000010736368656d6100010000001066656e63650007000000026f776e\
         65720009000000686f73743a313a610003736f75726365001b0000000273636f7065000b0000006465706c6f796d656e74000000036d6f6e\
         676f737562005300000010736368656d6100010000001066656e63650007000000026f776e65720009000000686f73743a313a610003736f\
         75726365001b0000000273636f7065000b0000006465706c6f796d656e7400000000",
    ),
    (
        "filter",
        "a value with a name that BSON cannot hold",
        "95b917af818dd3530d012f9739152b7b05c9c7ff711d03237d11dfe729a55b4b75d9774f61ad33f3ed218f3719358b1be5e9279f513d63c3\
         5d313f8709c5bbeb55f9d7ef41cd9393cd41efd7f955ebbbc509873f315dc3633d519f27e9e71b8b",
    ),
    (
        "pipeline",
        "a stage with a name that BSON cannot hold",
        "a7cb29c1939f80801f1341a94b273d8d17dbd911832f15358f23f1f93bb76d5d87eb896173bf4505ff33a1492b479c2df7fb39b1634f75d5\
         6f4351991bd7cdfd670be90153dfa5a5df5301e90b67fdcdd71b9951436fd5808080808080808080",
    ),
];
