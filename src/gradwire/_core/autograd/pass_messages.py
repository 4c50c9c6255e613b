"""The messages in which workers tell each other about contexts and backward passes.

Messages are encoded with `marshal`, which accepts plain tuples only. So each message has a named
type here. Only this module *packs* messages, that is, turns them into plain tuples, and unpacks
them. It uses C functions for this work where it can, because every call and every pass needs it.
The gradients are sent next to the marshalled value, as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gradwire._core.autograd.boundary import NOTHING, PASSED_ON, Gradient, SentTensor
from gradwire._core.autograd.termination import Relation

# -- with calls

#: The name of the tag that holds the packed metadata of a message.
TAG = "autograd"
#: The name of the tag on a result that requires gradients, if the call was made outside of any
#: context. The tag holds the name of the called function.
UNRECORDED_TAG = "unrecorded"


class AutogradMetadata(NamedTuple):
    """The metadata of a call that is made in an autograd context, or of the result of such a call.
    It travels beside the message, as a tag. (The name is torch's.)"""

    context_id: int
    #: The id by which backward passes refer to the message; 0 if none of its tensors requires
    #: gradients.
    message_id: int
    #: Whether gradients are enabled in the code that sends the message.
    grad_enabled: bool
    #: The ids of the context's backward passes that have succeeded since the last message to the
    #: same worker.
    successes: Sequence[int]
    #: The ids of other contexts that were released, so that the other worker releases them too.
    released: Sequence[int]


def pack_metadata(
    context_id: int,
    message_id: int,
    grad_enabled: bool,
    successes: Sequence[int],
    released: Sequence[int],
) -> tuple[Any, ...]:
    """Return the packed form of an `AutogradMetadata`, ready to send. The arguments are its
    fields."""
    return context_id, message_id, grad_enabled, successes, released


unpack_metadata: Callable[[tuple[Any, ...]], AutogradMetadata]
unpack_metadata = partial(tuple.__new__, AutogradMetadata)


# -- in passes


class PassOptions(NamedTuple):
    """The options of a backward pass, which every worker that takes part must know."""

    retain_graph: bool = False
    create_graph: bool = False
    #: Whether `grad` started the pass. Such a pass computes gradients only for the tensors given to
    #: `grad`, and visits only the tensors on a path to them (see `path_discovery`).
    for_inputs: bool = False
    #: How many seconds the pass may take from now on; 0 means without limit.
    seconds: float = 0.0


class ShortcutOffer(NamedTuple):
    """An offer to skip a worker that received a tensor and returned it unchanged.

    Worker A sent a tensor to worker B, and B returned it unchanged. In the backward pass, A finds
    the gradient of the returned tensor. The tensor that A sent has the same gradient. Without a
    shortcut, A sends the gradient to B, and B sends it back unchanged. So B offers that A uses the
    gradient directly.
    """

    #: The id of the message that returned the tensor.
    returned_in: int
    #: The position of the tensor in the message that returned it.
    position: int
    #: The id of the message in which the worker that makes the offer received the tensor. That
    #: message had no other differentiable tensor, so the position there is 0.
    sent_in: int


class SendForecast(NamedTuple):
    """Which tensors of one sent message will get gradients: their positions in the message."""

    send_id: int
    positions: Collection[int]


#: The packed gradients of one sent message. Usually all gradients are tensors. Then this is their
#: number, and the tensors are sent separately. If some gradients are not tensors, this is a list
#: with one item for each gradient: `_BESIDE` for a tensor, otherwise the value itself. None means
#: that there are no gradients.
PackedGradients = int | list[Any] | None
#: The id of a sent message, and the packed gradients of its tensors.
PackedAnswer = tuple[int, PackedGradients]


class PassMessage(NamedTuple):
    """What one worker tells another in a backward pass.

    Below, *this worker* is the one that sends the `PassMessage`, and the *other worker* is the one
    that gets it. A *send* is a message of the forward pass with differentiable tensors.
    """

    #: The ids of this worker's sends to the other worker that wait for gradients. Only the first
    #: message of a pass to the other worker has them.
    open_sends: Sequence[int]
    #: Packed offers to use the gradients of tensors that this worker returned unchanged. Only the
    #: first message of a pass to the other worker has them.
    shortcuts: Sequence[tuple[int, ...]]
    #: The packed gradients of tensors that the other worker sent.
    answers: Sequence[PackedAnswer]
    #: Whether the sender of this message is a child of its receiver in the pass and, if so, whether
    #: the sender is done (see `termination`).
    relation: Relation
    #: The ids of this worker's sends for which it needs to know now which tensors will get
    #: gradients (see `forecast`).
    questions: Sequence[int]
    #: The packed forecasts for the other worker: which tensors that it sent will get gradients.
    forecasts: Sequence[tuple[int, Collection[int]]]
    #: The tensors that the packed gradients in `answers` refer to, in their order.
    gradients: Sequence[Tensor] = ()


class PassRequest(NamedTuple):
    """A request of one worker to another in a backward pass: a `PassMessage`, and fields that
    describe the pass. The answer to a request is only a `PassMessage`, without those fields."""

    context_id: int
    pass_id: int
    options: PassOptions
    #: The ids of the context's failed passes, if these passes may have changed `.grad`. The other
    #: worker must undo their changes before this pass changes `.grad`.
    failures: Collection[int]
    #: In a pass started by `grad`: the sent and received tensors that the other worker must handle.
    #: The worker that called `grad` puts them into its first request to each worker. Otherwise
    #: None.
    share: set[SentTensor] | None
    message: PassMessage


# Each of these functions makes a named tuple of a plain one, in C. The constructor of a named tuple
# is a Python function and takes twice as long.
make_options: Callable[[tuple[Any, ...]], PassOptions] = partial(tuple.__new__, PassOptions)
make_message: Callable[[tuple[Any, ...]], PassMessage] = partial(tuple.__new__, PassMessage)
make_request: Callable[[tuple[Any, ...]], PassRequest] = partial(tuple.__new__, PassRequest)

#: A message in packed form, ready to send: a value that can be marshalled, and the gradients.
Packed = tuple[Any, Sequence[Tensor]]


def pack_request(
    context_id: int,
    pass_id: int,
    options: tuple[Any, ...],
    failures: Collection[int],
    share: set[SentTensor] | None,
    message: PassMessage,
) -> Packed:
    """Return the packed form of a `PassRequest`, ready to send. The arguments are its fields;
    `options` has the fields of a `PassOptions`."""
    value = context_id, pass_id, tuple(options), failures, share, message[:-1]
    return value, message.gradients


def unpack_request(value: Any, gradients: Sequence[Tensor]) -> PassRequest:
    """Return the request that `pack_request` has packed."""
    context_id, pass_id, options, failures, share, message = value
    named = make_message((*message, gradients))
    return make_request((context_id, pass_id, make_options(options), failures, share, named))


def unpack_message(value: Any, gradients: Sequence[Tensor]) -> PassMessage:
    """Return the answer to a request. `value` has all fields of the answer except the gradients,
    which were sent separately, as tensors."""
    return make_message((*value, gradients))


# -- gradients

#: Stands, in a packed answer, for a gradient that is a tensor and so is sent separately.
_BESIDE: Literal[True] = True


def pack_gradients(gradients: Sequence[Gradient] | None, beside: list[Tensor]) -> PackedGradients:
    """Pack the gradients for the tensors of a sent message. Append the gradients that are tensors
    to `beside`, a list of tensors that are sent separately. Return the packed gradients."""
    if gradients is None:
        return None
    packed: list[Any] = []
    all_beside = True
    for gradient in gradients:
        if gradient is None or gradient is NOTHING or gradient is PASSED_ON:
            packed.append(gradient)
            all_beside = False
        else:
            packed.append(_BESIDE)
            beside.append(gradient)
    return len(packed) if all_beside else packed


def unpack_gradients(packed: PackedGradients, beside: Iterator[Tensor]) -> list[Gradient] | None:
    """Return the gradients that `pack_gradients` has packed. `beside` yields, in order, the
    gradients that are tensors, because they were sent separately."""
    if packed is None:
        return None
    if type(packed) is int:
        return list(islice(beside, packed))
    assert type(packed) is list
    return [next(beside) if place is True else place for place in packed]
