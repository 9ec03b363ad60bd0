"""The audit: 62 checks of a training launch, before it starts (static) and while it runs (live).

``checks.py`` holds the registry and its states, ``rows/`` the checks of each of the nine groups. The static audit reads
launch scripts and configuration files without executing them (``shell.py``, ``launch.py``, ``project.py``), turns what
they say into ``facts.py``, evaluates the registry and the contradiction rules, and renders a report with the launch
command as a diff. Nothing here imports torch.
"""
