"""Whether layouts train the same model: replicas checked bit for bit, and two layouts compared layer by layer."""

from minloop.sameness.compare import Difference, compare_layouts, compare_records, first_difference
from minloop.sameness.full_tensors import full_gradients, full_weights
from minloop.sameness.record import LayoutRecord, record_layout
from minloop.sameness.replicas import check_replicas

__all__ = [
    "Difference",
    "LayoutRecord",
    "check_replicas",
    "compare_layouts",
    "compare_records",
    "first_difference",
    "full_gradients",
    "full_weights",
    "record_layout",
]
