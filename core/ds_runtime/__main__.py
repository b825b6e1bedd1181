"""`python -m ds_runtime`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working directory: nothing is loaded from there

from ds_runtime.cli import main

raise SystemExit(main())
