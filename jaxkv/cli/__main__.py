"""`python -m jaxkv.cli`."""

import sys

from jaxkv.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
