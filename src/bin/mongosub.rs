//! The `mongosub` command.

fn main() -> std::process::ExitCode {
    mongosub::cli::main()
}
