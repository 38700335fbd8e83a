"""The command `spark-dl certify` as a file, for spark-submit."""

from spark_dl.cli.main import main

if __name__ == "__main__":
    main("certify")
