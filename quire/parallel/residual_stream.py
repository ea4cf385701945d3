"""How the ranks of a tensor group store the residual stream: each has all tokens, or a part of them."""

from torch import Tensor

from quire.parallel.mesh import Communicator


class ResidualStream:
    """Every rank has the stream of all tokens (Megatron-LM, arXiv:1909.08053).

    A branch of a layer (attention, MLP) reads all tokens, and computes this rank's summand of the result:

        x = norm(stream)                 own tokens       [own tokens, hidden]
        summand = branch(whole(x))       all tokens       [tokens, hidden]
        stream += sum(summand)           own tokens

    Here, the own tokens are all tokens, and `sum` is an all-reduce.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of this rank's own tokens, as a view. x: [tokens, hidden]"""
        return x

    def whole(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows of all tokens. x: the rows of this rank's own tokens. tokens: any tensor with a row for each
        token."""
        return x

    def sum(self, summand: Tensor) -> Tensor:
        """Return the sum over the ranks, for this rank's own tokens. summand: [tokens, hidden]; it may be
        overwritten."""
        return self.group.all_reduce(summand)

    def pick(self, x: Tensor, wanted: Tensor | None, tokens: Tensor) -> Tensor:
        """Return the rows of this rank's own tokens among `wanted`; x itself for None. x, tokens: see `whole`."""
        return x if wanted is None else x.index_select(0, wanted)

    def complete(self, x: Tensor) -> None:
        """Fill in the rows of the other ranks' tokens. x: [tokens, hidden]"""

    def part(self, x: Tensor) -> Tensor:
        """Return the part of the stream that this rank sends to the next pipeline stage. Parts are disjoint, so each
        value is sent only once. x: [own tokens, hidden]"""
        start, stop = self.group.share(x.shape[1])
        return x[:, start:stop]

    def join(self, part: Tensor, hidden: int) -> Tensor:
        """Return the stream of this rank's own tokens from the parts that the ranks have received."""
        return self.group.all_gather(part, hidden)


class DividedStream(ResidualStream):
    """Each rank has the stream of its share of the tokens ("sequence parallelism" of Megatron-LM, arXiv:2205.05198).

    Norms and residual sums are computed for the own tokens only. `sum` is a reduce-scatter, `whole` an all-gather.
    Together they send as many bytes as the all-reduce. With fewer tokens than ranks, some ranks have none.
    """

    def own(self, x: Tensor) -> Tensor:
        start, stop = self.group.share(len(x))
        return x[start:stop]

    def whole(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.group.all_gather_rows(x, len(tokens))

    def sum(self, summand: Tensor) -> Tensor:
        return self.group.reduce_scatter(summand)

    def pick(self, x: Tensor, wanted: Tensor | None, tokens: Tensor) -> Tensor:
        return x if wanted is None else self.whole(x, tokens).index_select(0, self.own(wanted))

    def complete(self, x: Tensor) -> None:
        x.copy_(self.whole(self.own(x), x))

    def part(self, x: Tensor) -> Tensor:
        return x

    def join(self, part: Tensor, hidden: int) -> Tensor:
        return part
