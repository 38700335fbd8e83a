"""The commands of spark-dl, without a cluster."""
