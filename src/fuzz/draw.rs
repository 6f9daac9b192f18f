//! Values made out of bytes: whatever the bytes are, they make something. Behind their end all is zero.

use bson::oid::ObjectId;
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Decimal128, Document, Regex, Timestamp};

pub(super) struct Draw<'a> {
    bytes: &'a [u8],
}

/// Few, so that paths and fields meet.
const NAMES: [&str; 10] = ["a", "b", "c", "0", "1", "_id", "$match", "operationType", "", "b\0"];

impl<'a> Draw<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.some::<1>()[0]
    }

    pub(super) fn below(&mut self, end: u8) -> u8 {
        self.byte() % end
    }

    fn some<const N: usize>(&mut self) -> [u8; N] {
        let mut some = [0; N];
        let (taken, rest) = self.bytes.split_at(N.min(self.bytes.len()));
        some[..taken.len()].copy_from_slice(taken);
        self.bytes = rest;
        some
    }

    /// Of the names most, now and then one that cannot be used.
    pub(super) fn name(&mut self) -> &'static str {
        NAMES[usize::from(self.byte()).min(255 * 2 / 3) % if self.below(16) == 0 { 10 } else { 6 }]
    }

    pub(super) fn path(&mut self) -> String {
        let parts: Vec<&str> = (0..=self.below(3)).map(|_| self.name()).collect();
        parts.join(".")
    }

    fn integer(&mut self) -> i64 {
        match self.below(4) {
            0 => self.below(3).into(),
            1 => -1,
            2 => [i64::MAX, i64::MIN, 1 << 53, (1 << 53) + 1][usize::from(self.below(4))],
            _ => i64::from_le_bytes(self.some()),
        }
    }

    pub(super) fn values(&mut self, depth: u8) -> Vec<Bson> {
        (0..self.below(4)).map(|_| self.value(depth)).collect()
    }

    pub(super) fn document(&mut self, depth: u8) -> Document {
        (0..self.below(4)).map(|_| (self.name().to_owned(), self.value(depth))).collect()
    }

    pub(super) fn value(&mut self, depth: u8) -> Bson {
        match self.below(if depth == 0 { 14 } else { 18 }) {
            0 => Bson::Null,
            1 => Bson::Boolean(self.below(2) == 1),
            2 => Bson::String(["", "a", "$_id", "ä\0"][usize::from(self.below(4))].into()),
            #[allow(clippy::cast_possible_truncation, reason = "any number will do")]
            3 => Bson::Int32(self.integer() as i32),
            4 => Bson::Int64(self.integer()),
            5 => Bson::Double(f64::from_le_bytes(self.some())),
            #[allow(clippy::cast_precision_loss, reason = "any number will do")]
            6 => Bson::Double(self.integer() as f64),
            7 => Bson::Decimal128(Decimal128::from_bytes(self.some())),
            8 => Bson::Decimal128(self.integer().to_string().parse().expect("a number")),
            9 => Bson::DateTime(DateTime::from_millis(self.integer())),
            10 => Bson::Timestamp(Timestamp { time: self.byte().into(), increment: self.byte().into() }),
            11 => Bson::ObjectId(ObjectId::from_bytes(self.some())),
            12 => {
                let bytes = self.some::<3>()[..usize::from(self.below(4))].to_vec();
                Bson::Binary(Binary { subtype: BinarySubtype::from(self.below(3)), bytes })
            }
            13 => match self.below(5) {
                0 => Bson::Undefined,
                1 => Bson::MinKey,
                2 => Bson::MaxKey,
                3 => Bson::Symbol("a".into()),
                _ => {
                    Bson::RegularExpression(Regex { pattern: bson::cstr!("a").into(), options: bson::cstr!("").into() })
                }
            },
            14 | 15 => Bson::Document(self.document(depth - 1)),
            _ => Bson::Array(self.values(depth - 1)),
        }
    }
}
