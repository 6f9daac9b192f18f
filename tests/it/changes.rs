//! A source that changes: what it watches is dropped, renamed and made anew, its history is cut, or it is another one.

mod crash;
mod history;
mod identity;
mod invalidate;
mod skip;
