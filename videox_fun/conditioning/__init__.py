"""From a batch to conditioning tensors. One module per kind of condition, shared by the families."""
