"""Weights on their way: between a model and the arrays that Flower sends, and how far they moved.

Only the parameters that training changes travel (with adapters, the adapters alone), in fp32, on the host.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from fedmem.train.in_process_grid import Array, ArrayRecord, FederatedError
from fedmem.train.local_trainer import trained_parameters


def get_arrays(model) -> ArrayRecord:
    """The trained parameters as Flower sends them: fp32 on the host, a tied one once."""
    arrays = ArrayRecord()
    for name, parameter in trained_parameters(
        model
    ).items():  # one by one: from a GPU, all at once would be another model
        arrays[name] = Array(parameter.detach().float().cpu().contiguous().numpy())
    return arrays


@torch.no_grad()
def set_arrays(model, arrays: ArrayRecord) -> None:
    """Write received weights into a model, in place, one by one. A missing, unknown or misshapen array is an error."""
    parameters = trained_parameters(model)
    if different := set(parameters) ^ set(arrays):
        raise FederatedError(f"weights received and the model's differ in {sorted(different)}: not the same model.")
    for name, parameter in parameters.items():
        received = torch.from_numpy(arrays[name].numpy())
        if parameter.shape != received.shape:
            shapes = f"{tuple(received.shape)}, the model's {tuple(parameter.shape)}"
            raise FederatedError(f"the received {name} has shape {shapes}: not the same model.")
        parameter.copy_(received)


def drift(arrays: ArrayRecord, start: ArrayRecord) -> float:
    """‖w − w_t‖, the Euclidean distance over all arrays together, summed in double precision."""
    return _root_of_squares(arrays[name].numpy() - start[name].numpy() for name in start)


def norm(arrays: ArrayRecord) -> float:
    """‖w‖, the Euclidean norm over all arrays together, summed in double precision."""
    return _root_of_squares(array.numpy() for array in arrays.values())


def _root_of_squares(arrays: Iterable[np.ndarray]) -> float:
    flat = (array.ravel() for array in arrays)
    return math.sqrt(sum(float(np.einsum("i,i->", a, a, dtype=np.float64)) for a in flat))
