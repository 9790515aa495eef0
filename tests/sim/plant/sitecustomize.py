"""Plants the fault that the environment names, in each Python that starts with this folder in its PYTHONPATH."""

import os

if fault_name := os.environ.get("PLANTED_FAULT"):
    try:
        from tests.sim.planted import fault

        planting = fault(fault_name).plant()  # kept: it is undone where it is forgotten
        planting.__enter__()
    except ImportError:
        pass  # a Python without kvoffd, as that of a server that tests start
