"""Waits until a DaemonSet's pods are ready on all its nodes: ``wait_for_cleanup.py URL TOKEN_DIRECTORY SECONDS``."""

import json
import ssl
import sys
import time
import urllib.request

url, directory, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
until, problem = time.monotonic() + seconds, ""
context = ssl.create_default_context(cafile=f"{directory}/ca.crt")
while time.monotonic() < until:
    with open(f"{directory}/token") as token:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token.read()}"})
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            found = json.load(answer)
    except OSError as error:
        problem = f"Kubernetes does not answer: {error}."
    else:
        status = found["status"]
        ready, wanted = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
        if status.get("observedGeneration") == found["metadata"]["generation"] and ready == wanted:
            sys.exit(print(f"Cleaned {ready} nodes."))
        problem = f"{ready} of {wanted} nodes are cleaned."
    time.sleep(1)
sys.exit(f"{problem} The DaemonSet kvoffd-cleanup goes on as nodes come back; delete it when you need it no more.")
