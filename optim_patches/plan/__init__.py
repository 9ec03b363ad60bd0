"""The memory planner: what a run will need on its device and on the host, told before any weight is loaded."""
