"""``videox-doctor``: what this machine can do, tried out rather than looked up.

Everything that could crash (importing torch, a kernel, a compiler) runs in a process of its own with a time limit, so a
crash is a row of the report. The report's rows come from small modules: ``machine`` (system, devices, disks),
``packages`` (versions and optional packages), ``kernels`` (calls that must run), ``inputs`` (model and data).
"""
