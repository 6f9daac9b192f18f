//! Who may use whom in `src/`, read out of its source text: values ← seams ← backends | status ← run ← the public
//! faces ← front ends. Backends see neither each other nor the runtime; the runtime sees traits alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the crate, lowest layer first. A module may use those of lower layers, and the `beside` ones of its
/// own.
const LAYERS: &[Layer] = &[
    Layer {
        name: "values",
        beside: true,
        modules: &[
            "backoff",
            "checkpoint",
            "delivery",
            "error",
            "event",
            "filter",
            "handover",
            "hold",
            "ids",
            "letter",
            "on_failure",
            "reason",
            "start",
        ],
    },
    Layer {
        name: "seams",
        beside: true,
        modules: &[
            "audit",
            "batch_handler",
            "dead_letter",
            "fan_out",
            "handler",
            "model",
            "pulled",
            "storage",
            "transaction_handler",
            "transactional_storage",
        ],
    },
    Layer {
        name: "backends, status and suites",
        beside: false,
        modules: &["conformance", "memory", "mongo", "status"],
    },
    Layer { name: "runtime", beside: false, modules: &["run"] },
    Layer { name: "public faces", beside: true, modules: &["durable", "metrics", "registry", "subscription"] },
    Layer { name: "front ends", beside: false, modules: &["cli"] },
    Layer { name: "programs", beside: false, modules: &["bin"] },
    Layer { name: "fuzzing", beside: false, modules: &["fuzz"] },
];

struct Layer {
    name: &'static str,
    /// Whether its modules may use each other.
    beside: bool,
    modules: &'static [&'static str],
}

/// What no layer may use though it lies lower: the runtime and its faces know traits, not backends and suites.
const KEPT_APART: &[&str] = &["conformance", "memory", "mongo"];
const KEPT_APART_FROM: &[&str] = &["run", "durable", "metrics", "registry", "subscription"];

/// The driver is named in `mongo/` alone, but by the demo, which writes orders of its own, fills an oplog and asks a
/// server whether it is one of a replica set.
const DRIVER_NAMED_IN: &[&str] = &["mongo/", "cli/demo/"];

const LONGEST: usize = 400;

/// One file of `src/`: where it is, and its code without comments and unit tests.
struct Source {
    path: String,
    code: String,
    lines: usize,
}

impl Source {
    fn read(root: &Path, file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap();
        // The tests stand last, in a module of their own; an indented attribute is a method for them.
        let end = text.find("\n#[cfg(test)]\n").unwrap_or(text.len());
        let lines = text[..end].lines().count();
        let code = text[..end].lines().map(without_comment).collect::<Vec<_>>().join("\n");
        Self { path: file.strip_prefix(root).unwrap().to_str().unwrap().to_owned(), code, lines }
    }

    /// `run/saver.rs` is `["run", "saver"]`, `run/mod.rs` is `["run"]`.
    fn module(&self) -> Vec<&str> {
        let parts = self.path.trim_end_matches(".rs").split('/');
        parts.filter(|part| *part != "mod" && *part != "lib").collect()
    }

    fn top(&self) -> &str {
        self.module().first().copied().unwrap_or("lib")
    }

    /// The modules of the crate that its paths name: behind `crate::`, or behind as many `super::` as lead to the root.
    fn uses(&self, reexports: &BTreeMap<String, String>) -> BTreeSet<String> {
        let depth = self.module().len();
        let up = "super::".repeat(depth);
        let roots = ["crate::".to_owned(), up].into_iter().filter(|root| !root.is_empty());
        let paths =
            roots.flat_map(|root| self.code.split(root.as_str()).skip(1).flat_map(first_names).collect::<Vec<_>>());
        paths.map(|name| reexports.get(&name).cloned().unwrap_or(name)).collect()
    }
}

/// Strings that hold `//` do not matter here: what follows it in them is no path of the crate.
fn without_comment(line: &str) -> &str {
    line.find("//").map_or(line, |at| &line[..at])
}

/// `model::Plan` names `model`; `{model::Plan, run}` names both.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut depth, mut names, mut next) = (0, Vec::new(), String::new());
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => names.push(std::mem::take(&mut next)),
            c if depth == 0 => next.push(c),
            _ => {}
        }
    }
    names.push(next);
    names.iter().map(|text| name(text.trim())).filter(|name| !name.is_empty()).collect()
}

fn sources() -> Vec<Source> {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
                files.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    files.sort();
    let sources: Vec<Source> = files.iter().map(|file| Source::read(&root, file)).collect();
    assert!(sources.len() > 40, "src was not found");
    sources
}

/// What `lib.rs` gives a second name at the root, with the module it comes from.
fn reexports(sources: &[Source]) -> BTreeMap<String, String> {
    let lib = sources.iter().find(|source| source.path == "lib.rs").unwrap();
    let uses = lib.code.split("pub use ").skip(1).filter_map(|item| item.split(';').next()?.split_once("::"));
    uses.flat_map(|(module, names)| {
        let names = names.rsplit("::").next().unwrap().trim_matches(['{', '}']);
        let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(|name| (name.to_owned(), module.to_owned())).collect::<Vec<_>>()
    })
    .collect()
}

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.modules.contains(&module))
}

/// What is wrong with one module's use of another, if anything is.
fn refusal(module: &str, used: &str) -> Option<String> {
    if module == used {
        return None;
    }
    let (Some(above), Some(below)) = (layer_of(module), layer_of(used)) else {
        return Some(format!("`{module}` or `{used}` stands in no layer: say in this test which one is its own"));
    };
    if below > above || (below == above && !LAYERS[above].beside) {
        let (above, below) = (LAYERS[above].name, LAYERS[below].name);
        return Some(format!("`{module}` ({above}) may not use `{used}` ({below})"));
    }
    if KEPT_APART.contains(&used) && KEPT_APART_FROM.contains(&module) {
        return Some(format!("`{module}` knows traits only, and may not use `{used}`"));
    }
    None
}

#[test]
fn every_module_uses_lower_layers_only() {
    let sources = sources();
    let reexports = reexports(&sources);
    let mut refused = Vec::new();
    let mut edges = 0;
    for source in sources.iter().filter(|source| source.path != "lib.rs") {
        for used in source.uses(&reexports) {
            edges += 1;
            refused.extend(refusal(source.top(), &used).map(|why| format!("src/{}: {why}", source.path)));
        }
    }
    assert!(edges > 200, "the paths were not read: {edges}");
    assert!(refused.is_empty(), "\n{}", refused.join("\n"));
}

#[test]
fn the_driver_is_named_in_its_own_backend_and_in_the_demo_only() {
    let named: Vec<String> = sources()
        .iter()
        .filter(|source| source.code.contains("mongodb::") && !source.path.starts_with("bin/"))
        .map(|source| source.path.clone())
        .filter(|path| !DRIVER_NAMED_IN.iter().any(|folder| path.starts_with(folder)))
        .collect();
    assert_eq!(named, Vec::<String>::new());
}

#[test]
fn no_file_is_longer_than_400_lines_without_its_tests() {
    let long: Vec<(String, usize)> = sources()
        .into_iter()
        .filter(|source| source.lines > LONGEST)
        .map(|source| (source.path, source.lines))
        .collect();
    assert_eq!(long, Vec::<(String, usize)>::new());
}

#[test]
fn a_wrong_edge_would_be_seen() {
    for (user, used) in [
        ("memory", "mongo"),
        ("mongo", "run"),
        ("run", "mongo"),
        ("run", "subscription"),
        ("conformance", "memory"),
        ("model", "memory"),
        ("ids", "storage"),
        ("durable", "memory"),
        ("status", "run"),
        ("metrics", "cli"),
        ("cli", "bin"),
        ("run", "unheard_of"),
    ] {
        assert!(refusal(user, used).is_some(), "{user} uses {used}");
    }
    for (user, used) in [("cli", "mongo"), ("durable", "run"), ("run", "status"), ("model", "filter")] {
        assert_eq!(refusal(user, used), None, "{user} uses {used}");
    }
    let code = "use crate::{ids::{A, B}, run::x};\nfn f() { crate::Filter::all(super::super::mongo::x) } // crate::cli";
    let code = code.lines().map(without_comment).collect::<Vec<_>>().join("\n");
    let source = Source { path: "memory/reader.rs".into(), code, lines: 2 };
    let reexports = BTreeMap::from([("Filter".to_owned(), "filter".to_owned())]);
    let uses: Vec<String> = source.uses(&reexports).into_iter().collect();
    assert_eq!(uses, ["filter", "ids", "mongo", "run"]);
}
