# The commands of CONTRIBUTING.md. `just --list` shows them.

# Installs the package with its tests' needs, for a CPU.
setup:
    pip install "torch<2.14" --index-url https://download.pytorch.org/whl/cpu
    pip install -e ".[cpu,dev]"

# Formats the code.
format:
    ruff check --fix .
    ruff format .

# Checks style, types, imports, sizes and generated pages.
lint:
    ruff check .
    ruff format --check .
    mypy
    lint-imports
    python tools/house.py --check
    python tools/gen_docs.py --check
    python tools/changelog.py --check

# Runs the tests below some paths.
test *PATHS:
    python -m pytest -x {{ PATHS }}

# Writes the generated pages and the tables of README and docs/operating.md.
generate:
    python tools/gen_docs.py
    python benchmarks/readme_tables.py
    python benchmarks/operating_tables.py

# Builds the documentation site into build/site.
docs:
    mkdocs build --strict

# Runs what a change must pass.
ci:
    .ci/run
