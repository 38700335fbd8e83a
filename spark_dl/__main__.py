"""`python -m spark_dl`, the command `spark-dl`; or, for spark-submit, this file with the command as its argument."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's folder is the first place of modules: `import config` of a user would find spark_dl/config.
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != Path(__file__).resolve().parent]

    from spark_dl.cli.main import main

    main()
