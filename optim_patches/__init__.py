"""Optional optimizations: one file per patch, a registry, and the audit that says what really ran."""
