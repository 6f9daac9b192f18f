//! `cargo run --example seeds` writes valid inputs into `corpus/TARGET/`, for the fuzzer to begin with.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    for (target, _) in mongosub::fuzz::TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        fs::create_dir_all(&folder)?;
        for (number, seed) in mongosub::fuzz::seeds(target).iter().enumerate() {
            fs::write(folder.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
