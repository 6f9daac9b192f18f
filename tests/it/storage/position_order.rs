//! The order of positions, on tokens built the way the server builds them: it is total over tokens and times, and it is
//! the order of the stream.

use std::cmp::Ordering;

use mongosub::bson::Timestamp;
use mongosub::{Checkpoint, Token};
use proptest::prelude::*;

/// A place in a stream, before it is written as a checkpoint. The order of the variants is the stream's: an operation
/// time of T lies before everything of T, and a quiet token of T before T's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Time,
    Quiet,
    Event { index: u32, invalidate: bool },
}

/// A non-negative integer as the server's key strings hold it: its length, then twice the number.
fn number(number: u32) -> String {
    if number == 0 {
        return "29".into();
    }
    let hex = format!("{:X}", u64::from(number) << 1);
    let bytes = hex.len().div_ceil(2);
    format!("{:02X}{hex:0>width$}", 0x2A + bytes, width = 2 * bytes)
}

fn checkpoint(time: Timestamp, place: Place) -> Checkpoint {
    let begin = format!("82{:08X}{:08X}2B02", time.time, time.increment);
    let hex = match place {
        Place::Time => return time.into(),
        Place::Quiet => format!("{begin}29296E04"),
        Place::Event { index, invalidate } => {
            let flag = if invalidate { "6F" } else { "6E" };
            // One document is changed twice in a transaction as well as two: the key does not order them.
            let key = if index % 2 == 0 { "FF" } else { "00" };
            format!("{begin}2C0100{}{flag}5A1004{}46645F69640064{}0004", number(index), "AB".repeat(16), key.repeat(12))
        }
    };
    Token::new(hex).unwrap().into()
}

fn place() -> impl Strategy<Value = Place> {
    let index = prop_oneof![0_u32..4, 120_u32..140, 32_760_u32..32_780, 0_u32..100_000];
    prop_oneof![
        Just(Place::Time),
        Just(Place::Quiet),
        (index, any::<bool>()).prop_map(|(index, invalidate)| Place::Event { index, invalidate }),
    ]
}

fn timestamp() -> impl Strategy<Value = Timestamp> {
    let edge = prop_oneof![0_u32..4, 14_u32..18, 254_u32..258, 0x7FFF_FFFE_u32..=0x8000_0001, u32::MAX - 1..=u32::MAX,];
    (edge.clone(), edge).prop_map(|(time, increment)| Timestamp { time, increment })
}

fn spot() -> impl Strategy<Value = (Timestamp, Place)> {
    (timestamp(), place())
}

proptest! {
    #[test]
    fn the_order_of_positions_is_the_order_of_the_stream(a in spot(), b in spot()) {
        prop_assert_eq!(checkpoint(a.0, a.1).position_cmp(&checkpoint(b.0, b.1)), Some(a.cmp(&b)));
    }

    #[test]
    fn the_order_of_positions_at_one_time_is_the_order_of_the_stream(time in timestamp(), a in place(), b in place()) {
        prop_assert_eq!(checkpoint(time, a).position_cmp(&checkpoint(time, b)), Some(a.cmp(&b)));
    }

    #[test]
    fn the_order_is_antisymmetric_and_transitive(spots in proptest::array::uniform3(spot())) {
        let [a, b, c] = spots.map(|(time, place)| checkpoint(time, place));
        let (ab, ba) = (a.position_cmp(&b).unwrap(), b.position_cmp(&a).unwrap());
        prop_assert_eq!(ab, ba.reverse());
        prop_assert_eq!(ab == Ordering::Equal, a == b);
        prop_assert_eq!(a.is_beyond(&b), ab == Ordering::Greater);
        let bc = b.position_cmp(&c).unwrap();
        if ab != Ordering::Greater && bc != Ordering::Greater {
            prop_assert_ne!(a.position_cmp(&c), Some(Ordering::Greater));
        }
    }

    #[test]
    fn a_token_tells_the_time_it_was_built_with(spot in spot()) {
        prop_assert_eq!(checkpoint(spot.0, spot.1).cluster_time(), Some(spot.0));
    }

    #[test]
    fn text_is_beyond_any_other_position_and_never_before_one(text in "[a-z0-9.]{0,8}", spot in spot()) {
        let (text, other) = (Checkpoint::Text(text.into()), checkpoint(spot.0, spot.1));
        prop_assert_eq!(text.position_cmp(&other), None);
        prop_assert_eq!(other.position_cmp(&text), None);
        prop_assert!(text.is_beyond(&other) && other.is_beyond(&text));
        prop_assert_eq!(text.position_cmp(&text.clone()), Some(Ordering::Equal));
        prop_assert!(!text.is_beyond(&text.clone()));
    }
}
