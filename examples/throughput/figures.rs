//! Medians, and the lines that are printed.

use std::collections::BTreeMap;

/// Rounds that disagree by more are repeated.
const AGREEMENT: f64 = 0.10;
pub const ROUNDS: usize = 5;
pub const ROUNDS_AT_MOST: usize = 9;

/// What was measured, by name, in the order of the rounds.
#[derive(Default)]
pub struct Figures {
    values: BTreeMap<String, (Vec<f64>, &'static str)>,
}

impl Figures {
    pub fn take(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.values.entry(name.into()).or_insert_with(|| (Vec::new(), unit)).0.push(value);
    }

    pub fn median(&self, name: &str) -> f64 {
        self.values.get(name).map_or(f64::NAN, |(values, _)| median(values))
    }

    /// The median of what the rounds say of one figure beside another: what slows a whole round down slows both.
    pub fn ratio(&self, name: &str, beside: &str) -> f64 {
        let of = |name: &str| self.values.get(name).map_or(&[][..], |(values, _)| values);
        median(&of(name).iter().zip(of(beside)).map(|(value, beside)| value / beside).collect::<Vec<_>>())
    }

    /// Whether the middle half of the rounds agrees, for every figure of this prefix.
    pub fn agree(&self, prefix: &str) -> bool {
        let of = self.values.iter().filter(|(name, _)| name.starts_with(prefix));
        of.into_iter().all(|(_, (values, _))| spread(values) <= AGREEMENT)
    }

    pub fn print(&self) {
        for (name, (values, unit)) in &self.values {
            let spread = 100.0 * spread(values);
            println!("{name} {:.2} {unit} spread {spread:.0} % rounds {}", median(values), values.len());
        }
    }
}

pub fn ratio(name: &str, value: f64, goal: &str) {
    println!("ratio {name} {value:.3} goal {goal}");
}

pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

pub fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() {
        return f64::NAN;
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "an index")]
    let index = ((sorted.len() - 1) as f64 * at).round() as usize;
    sorted[index]
}

/// How far the quartiles lie apart, in parts of the median.
fn spread(values: &[f64]) -> f64 {
    (quantile(values, 0.75) - quantile(values, 0.25)) / median(values)
}
