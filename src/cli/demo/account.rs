//! The reckoning: what was written, what was handled, in which order.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::checkpoint::Checkpoint;

/// Every order handled, as it came.
#[derive(Debug, Default)]
pub(super) struct Account {
    seen: BTreeSet<u32>,
    handled: u32,
    out_of_order: bool,
    last: Option<Checkpoint>,
}

impl Account {
    pub(super) fn take(&mut self, order: u32, position: Checkpoint) {
        self.handled += 1;
        // A repeat may come again; an order that is new must be newer than every one before it.
        let newest = self.seen.last().is_none_or(|last| order > *last);
        if self.seen.insert(order) {
            self.out_of_order |= !newest;
            self.last = Some(position);
        }
    }

    pub(super) fn delivered(&self) -> u32 {
        u32::try_from(self.seen.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn repeated(&self) -> u32 {
        self.handled - self.delivered()
    }

    pub(super) fn has(&self, order: u32) -> bool {
        self.seen.contains(&order)
    }

    /// The position of the newest order.
    pub(super) fn last(&self) -> Option<&Checkpoint> {
        self.last.as_ref()
    }

    /// How many of the orders `1..=written` are missing; one that came out of order counts as one.
    pub(super) fn lost(&self, written: u32) -> u32 {
        self.missing(1..=written).max(u32::from(self.out_of_order))
    }

    /// The account in one line.
    pub(super) fn line(&self, written: u32) -> String {
        let (delivered, lost, repeated) = (self.delivered(), self.lost(written), self.repeated());
        let order = if self.out_of_order { "OUT OF ORDER" } else { "in order" };
        format!("delivered {delivered} of {written}, lost {lost}, repeated {repeated}, {order}")
    }

    /// The account of the orders after the first `before`, when `repeated` deliveries had been repeats by then.
    pub(super) fn line_since(&self, before: u32, repeated: u32, written: u32) -> String {
        let (new, lost) = (written - before, self.missing(before + 1..=written));
        format!("delivered {} of {new}, lost {lost}, repeated {}", new - lost, self.repeated() - repeated)
    }

    fn missing(&self, orders: RangeInclusive<u32>) -> u32 {
        let missing = orders.filter(|order| !self.seen.contains(order)).count();
        u32::try_from(missing).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(orders: &[u32]) -> Account {
        let mut account = Account::default();
        for order in orders {
            account.take(*order, Checkpoint::Text("p".into()));
        }
        account
    }

    #[test]
    fn repeats_are_counted_and_are_no_loss() {
        let account = account(&[1, 2, 3, 2, 3, 4]);
        assert_eq!(account.line(4), "delivered 4 of 4, lost 0, repeated 2, in order");
        assert_eq!(account.line_since(3, 2, 4), "delivered 1 of 1, lost 0, repeated 0");
    }

    #[test]
    fn a_missing_order_and_one_out_of_order_are_losses() {
        assert_eq!(account(&[1, 2, 4]).lost(4), 1);
        assert_eq!(account(&[1, 2]).lost(4), 2);
        assert_eq!(account(&[1, 3, 2]).lost(3), 1);
    }
}
