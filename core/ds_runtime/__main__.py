"""`python -m ds_runtime`."""

from ds_runtime.cli import main

raise SystemExit(main())
