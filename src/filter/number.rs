//! The order of numbers of different types, exactly, as a server has it.

use std::cmp::Ordering;

use bson::{Bson, Decimal128, RawBsonRef};

#[derive(Clone, Copy)]
pub(super) enum Number {
    Integer(i64),
    Double(f64),
    Decimal(Decimal128),
}

impl Number {
    pub(super) fn of(value: &Bson) -> Option<Self> {
        match value {
            Bson::Int32(number) => Some(Self::Integer((*number).into())),
            Bson::Int64(number) => Some(Self::Integer(*number)),
            Bson::Double(number) => Some(Self::Double(*number)),
            Bson::Decimal128(number) => Some(Self::Decimal(*number)),
            _ => None,
        }
    }

    pub(super) fn of_raw(value: RawBsonRef<'_>) -> Option<Self> {
        match value {
            RawBsonRef::Int32(number) => Some(Self::Integer(number.into())),
            RawBsonRef::Int64(number) => Some(Self::Integer(number)),
            RawBsonRef::Double(number) => Some(Self::Double(number)),
            RawBsonRef::Decimal128(number) => Some(Self::Decimal(number)),
            _ => None,
        }
    }
}

/// The order of two numbers; NaN equals NaN and has no order beside any other.
pub(super) fn compare(a: Option<Number>, b: Option<Number>) -> Option<Ordering> {
    match (a?, b?) {
        (Number::Integer(a), Number::Integer(b)) => Some(a.cmp(&b)),
        (Number::Double(a), Number::Double(b)) if !a.is_nan() && !b.is_nan() => a.partial_cmp(&b),
        (a, b) => match (Parts::of(a), Parts::of(b)) {
            (Parts::Nan, Parts::Nan) => Some(Ordering::Equal),
            (Parts::Nan, _) | (_, Parts::Nan) => None,
            (a, b) => Some(a.cmp(&b)),
        },
    }
}

/// A number taken apart.
enum Parts {
    Nan,
    Infinite {
        negative: bool,
    },
    /// `0.d1d2d3..` times ten to the exponent; no digits for zero, neither the first nor the last of them is 0.
    Finite {
        negative: bool,
        exponent: i64,
        digits: Vec<u8>,
    },
}

impl Parts {
    fn of(number: Number) -> Self {
        match number {
            Number::Integer(number) => Self::parse(&number.to_string()),
            Number::Double(number) if number.is_nan() => Self::Nan,
            Number::Double(number) if number.is_infinite() => Self::Infinite { negative: number < 0.0 },
            // Every double has at most 1074 decimal places; this prints it exactly.
            Number::Double(number) => Self::parse(&format!("{number:.1074}")),
            Number::Decimal(number) => Self::parse(&number.to_string()),
        }
    }

    /// Reads `-12.50`, `1E+3`, `NaN` and `-Infinity`.
    fn parse(text: &str) -> Self {
        let (negative, text) = match text.strip_prefix('-') {
            Some(text) => (true, text),
            None => (false, text),
        };
        match text {
            "NaN" => return Self::Nan,
            "Infinity" => return Self::Infinite { negative },
            _ => {}
        }
        let (mantissa, power) = text.split_once(['E', 'e']).unwrap_or((text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits = whole.bytes().chain(fraction.bytes());
        let zeros = digits.clone().take_while(|digit| *digit == b'0').count();
        let mut digits: Vec<u8> = digits.skip(zeros).collect();
        while digits.last() == Some(&b'0') {
            digits.pop();
        }
        let power: i64 = power.trim_start_matches('+').parse().unwrap_or(0);
        let before_point = i64::try_from(whole.len()).unwrap_or(0) - i64::try_from(zeros).unwrap_or(0);
        Self::Finite { negative, exponent: power + before_point, digits }
    }

    /// Which side of zero, and whether beyond every finite number.
    fn rank(&self) -> i8 {
        match self {
            Self::Nan => -3,
            Self::Infinite { negative } => {
                if *negative {
                    -2
                } else {
                    2
                }
            }
            Self::Finite { digits, .. } if digits.is_empty() => 0,
            Self::Finite { negative, .. } => {
                if *negative {
                    -1
                } else {
                    1
                }
            }
        }
    }

    fn cmp(&self, other: &Self) -> Ordering {
        let by_rank = self.rank().cmp(&other.rank());
        if by_rank.is_ne() || self.rank().abs() != 1 {
            return by_rank;
        }
        let size = match (self, other) {
            (Self::Finite { exponent: a, digits: x, .. }, Self::Finite { exponent: b, digits: y, .. }) => {
                a.cmp(b).then_with(|| x.cmp(y))
            }
            _ => Ordering::Equal,
        };
        if self.rank() < 0 { size.reverse() } else { size }
    }
}
