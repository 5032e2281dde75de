"""`python -m duetime`; also the file to hand to spark-submit, with `run` as its argument.

spark-submit [--master ...] --jars ... <where Python has duetime>/__main__.py run --config FILE
"""

import sys

if not __package__:
    # Run as a file, whose directory Python puts first: our modules must not pass for others' there.
    sys.path.pop(0)

from duetime.cli import main

if __name__ == "__main__":
    # Not in the child processes of a benchmark, which import this file.
    sys.exit(main())
