"""Conversion of weights between a model and the arrays that Flower sends, and the distance between two sets of weights.

Only the trained parameters are sent (with adapters, the adapters alone), in fp32, from host memory.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from fedmem.train.in_process_grid import Array, ArrayRecord, FederatedError
from fedmem.train.local_trainer import trained_parameters


def get_arrays(model) -> ArrayRecord:
    """The trained parameters as Flower sends them: fp32 in host memory, a tied parameter once."""
    arrays = ArrayRecord()
    for name, parameter in trained_parameters(model).items():
        # one by one: all at once would hold another model on the GPU
        arrays[name] = Array(parameter.detach().float().cpu().contiguous().numpy())
    return arrays


@torch.no_grad()
def set_arrays(model, arrays: ArrayRecord) -> None:
    """Write received weights into a model, in place, one by one.

    Raises FederatedError when an array is missing, is unknown to the model or has another shape.
    """
    parameters = trained_parameters(model)  # names are compared before anything is written
    if different := set(parameters) ^ set(arrays):
        raise FederatedError(
            f"received weights and the model's differ in {sorted(different)}: they are of different models."
        )
    for name, parameter in parameters.items():
        received = torch.from_numpy(arrays[name].numpy())
        if parameter.shape != received.shape:
            shapes = f"{tuple(received.shape)}, the model's {tuple(parameter.shape)}"
            raise FederatedError(f"the received {name} has shape {shapes}: they are of different models.")
        parameter.copy_(received)


def drift(arrays: ArrayRecord, start: ArrayRecord) -> float:
    """‖w − w_t‖, the Euclidean distance over all arrays together, summed in double precision.

    arrays: w; start: w_t, arrays of the same names and shapes.
    """
    return _root_of_squares(arrays[name].numpy() - start[name].numpy() for name in start)


def norm(arrays: ArrayRecord) -> float:
    """‖w‖, the Euclidean norm over all arrays together, summed in double precision."""
    return _root_of_squares(array.numpy() for array in arrays.values())


def _root_of_squares(arrays: Iterable[np.ndarray]) -> float:
    # A generator holds one array at a time. Double precision: a sum over millions of fp32 squares loses digits.
    flat = (array.ravel() for array in arrays)
    return math.sqrt(sum(float(np.einsum("i,i->", a, a, dtype=np.float64)) for a in flat))
