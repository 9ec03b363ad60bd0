"""What is minimised. An objective owns the networks it trains and the order in which they are updated."""

from __future__ import annotations

from videox_fun.training.objectives.base import LossOutput, Objective, Phase
from videox_fun.training.objectives.flow_match import FlowMatch

OBJECTIVES: dict[str, type[Objective]] = {"flow_match": FlowMatch}

__all__ = ["OBJECTIVES", "FlowMatch", "LossOutput", "Objective", "Phase"]
