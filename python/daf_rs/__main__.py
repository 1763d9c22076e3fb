"""`python -m daf_rs`: see `daf_rs.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
