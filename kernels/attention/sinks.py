import torch


def with_sinks(out_XD: torch.Tensor, lse_X: torch.Tensor, sink_X: torch.Tensor) -> torch.Tensor:
    """Return attention with sinks, computed from attention without them.

    A sink adds exp(sink) to the softmax's sum, and so leaves sigmoid(lse - sink) of the output.

    Args:
        lse_X: Natural log-sum-exp of the scaled logits.
        sink_X: The row's sink; broadcast to lse_X.
    """
    return (out_XD * (lse_X - sink_X).sigmoid()[..., None]).to(out_XD.dtype)
