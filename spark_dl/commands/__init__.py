"""The commands of `spark-dl`, a module each: its options, what it calls, and what it prints."""
