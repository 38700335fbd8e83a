#!/usr/bin/env bash
# Tells Spark which GPUs this host has: spark.executor.resource.gpu.discoveryScript.
addresses=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/.*/"&"/' | paste -sd,)
echo "{\"name\": \"gpu\", \"addresses\": [$addresses]}"
