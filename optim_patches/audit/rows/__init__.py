"""The checks, one module per group; ``checks.registry()`` joins them."""
