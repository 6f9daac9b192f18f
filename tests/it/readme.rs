//! What the README says is shown by a test is: every test it names stands in `tests/`.

use std::fs;
use std::path::{Path, PathBuf};

/// The rows of the table of promises: what is promised, and the tests named for it.
fn rows() -> Vec<(String, Vec<String>)> {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let table = text.split_once("\n| | promise | in the bad case | shown by |\n").expect("the table of promises").1;
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        assert_eq!(cells.len(), 4, "{row}");
        let named = cells[3].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        (cells[0].trim().to_owned(), named)
    })
    .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether a test of this name stands there: `module::function` in `tests/it`, a sentence in `tests/mongo`.
fn exists(name: &str) -> bool {
    if let Some((module, function)) = name.rsplit_once("::") {
        let file = root().join("tests/it").join(module.replace("::", "/")).with_extension("rs");
        let source = fs::read_to_string(file).unwrap_or_default();
        let (declared, lines) = (format!("fn {function}("), source.lines().map(str::trim).collect::<Vec<_>>());
        let is_test = |pair: &[&str]| {
            let attribute = pair[0].starts_with("#[test]") || pair[0].starts_with("#[tokio::test");
            attribute && pair[1].trim_start_matches("async ").starts_with(&declared)
        };
        return lines.windows(2).any(is_test);
    }
    let quoted = format!("\"{name}\",");
    sources(&root().join("tests/mongo")).iter().any(|file| fs::read_to_string(file).unwrap().contains(&quoted))
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

#[test]
fn every_promise_of_the_readme_names_tests_that_exist() {
    let rows = rows();
    assert!(rows.len() >= 9, "{rows:?}");
    for (promise, named) in &rows {
        assert!(!named.is_empty(), "{promise}: no test is named");
        for name in named {
            assert!(exists(name), "{promise}: there is no test {name:?}");
        }
    }
}

#[test]
fn a_name_that_is_no_tests_would_be_seen() {
    assert!(exists("readme::a_name_that_is_no_tests_would_be_seen"));
    assert!(exists("a write held in the oplog while a subscription starts is delivered"));
    for name in ["readme::rows", "crash::no_such_test", "nowhere::rows", "a write held in the oplog", "no such test"] {
        assert!(!exists(name), "{name}");
    }
}
