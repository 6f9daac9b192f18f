//! A source that changes: what it watches is dropped, renamed and made anew.

mod invalidate;
