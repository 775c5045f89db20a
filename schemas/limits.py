"""Limits of everything that enters a process from outside, one set of numbers for senders and receivers.

A sender fails with a clear error before anything beyond a limit leaves; a receiver drops the message and counts it.
`actors topology` prints TABLE, and docs/reference/security.md explains it.
"""

from dataclasses import dataclass

MIB = 1 << 20

# --- bus: one message ---

CONTROL_HEADER_BYTES = 1 * MIB
CONTROL_FRAME_BYTES = 1 * MIB
CONTROL_MESSAGE_BYTES = 2 * MIB
DATA_HEADER_BYTES = 4 * MIB
DATA_FRAME_BYTES = 64 * MIB
TOKEN_BYTES = 4
"""Bytes of a token id, a logprob or an advantage. The longest arrays of a message have one such number per token."""
BATCH_TOKEN_BYTES = 21
"""Bytes of a token in a batch: five arrays of TOKEN_BYTES, and the mask."""
FRAMES = 320
MESSAGE_BYTES = 512 * MIB
BATCH_BYTES, PART_BYTES = 16384 * MIB, 32 * MIB
"""Bytes of a trainer rank's batch, and of a part: batches beyond a message travel in parts."""
IMAGES, GROUP_IMAGES, IMAGES_BYTES = 64, 1024, 256 * MIB
"""Images of a prompt, of a group whose trajectories have different ones, and the bytes of either together."""
IMAGE_PIXELS = 178_956_970
"""Pixels of an image; Pillow decodes no larger one."""
IMAGE_ASPECT_RATIO = 200
"""Largest ratio of the sides of an image, as in the processors of Qwen2.5-VL and Qwen3-VL."""

# --- bus: bytes received of a message that is not complete (decision 0023) ---

# the largest message, and a margin
CONTROL_UNFINISHED_BYTES = CONTROL_MESSAGE_BYTES + (64 << 10)
CONTROL_UNFINISHED_TOTAL_BYTES = 64 * MIB
DATA_UNFINISHED_BYTES = MESSAGE_BYTES + MIB
DATA_UNFINISHED_TOTAL_BYTES = 4096 * MIB
UNFINISHED_SMALL_BYTES = 4 * MIB
"""Bytes of incomplete messages up to which memory growth is not attributed to tiny frames."""
UNFINISHED_GROWTH, UNFINISHED_GROWTH_BYTES = 4, 256 * MIB
"""Sign of frames of a few bytes: libzmq's memory grows by more than 4 times the bytes received, and by 256 MiB."""

# --- bus: msgpack headers, whose lists and maps take far more memory than bytes on the wire ---

LIST_ITEMS = 8000
"""Items of a list in a header. Lists nested to msgpack's depth (1024), announced and never filled, then take 63 MiB."""
MAP_ITEMS = 4096
CONTAINERS = 50_000
NESTING_CHECKED_FROM = 200
"""Lists and maps in a header from which on its nesting is checked: fewer can't nest deeper than msgpack packs (511)."""

# --- descriptors of a process ---

DESCRIPTORS = 1 << 20
"""Descriptors to which a process raises its soft limit, if the hard limit allows as many."""
SOCKETS = 65_535
"""Sockets of a ZeroMQ context; libzmq accepts no larger number."""
OWN_DESCRIPTORS, DESCRIPTORS_PER_PEER = 256, 2
"""Descriptors of an actor without peers, and for each peer that connects to it."""
DESCRIPTORS_PER_SOCKET, DESCRIPTORS_PER_SOCKET_WITH_KEYS = 3, 6
"""Descriptors for each socket that connects to a peer, one spare included; with keys the socket has a monitor."""

# --- HTTP: completions and metrics ---

HTTP_BODY_BYTES = 16 * MIB
HTTP_IMAGES_BODY_BYTES = HTTP_BODY_BYTES + IMAGES_BYTES
"""Body of a request with images: any other body, and the bytes of a group's images behind it."""
HTTP_CONNECTIONS = 8192
HTTP_HEAD_SECONDS = 30.0
HTTP_CONNECTION_SECONDS = 60.0
HTTP_METRICS_CONNECTIONS = 16
HTTP_PROMPTS = 1024
HTTP_CHOICES = 8192
HTTP_STOPS, HTTP_STOP_CHARACTERS = 64, 1000
HTTP_LOGIT_BIAS = 4096
HTTP_TOOLS = 128
HTTP_LARGE_REQUESTS = 16
HTTP_IMAGE_REQUESTS = 4

# --- contents of heartbeats and directives ---

NAME_BYTES = 200
HEARTBEAT_REPORTS = 200
HEARTBEAT_REPORT_BYTES = 512 << 10
HEARTBEAT_FAILURES = 200
HEARTBEAT_NOTES = 20
DIRECTIVE_TICKETS = 1000
LOAD_SHOWN = 32_767
POLICIES_SHOWN = 127
ACTORS_SHOWN = 1000
ADDRESS_BYTES = 4096
DETAIL_CHARACTERS = 1000
REASON_CHARACTERS = 4000


@dataclass(frozen=True)
class Limit:
    """Row of the table of limits: name, value, unit, and the reason or an explanation of the value."""

    name: str
    value: int
    unit: str
    why: str


TABLE = (
    Limit("control: header", CONTROL_HEADER_BYTES, "bytes", "a heartbeat with 5 000 holds has 80 KiB, in an array"),
    Limit("control: frame", CONTROL_FRAME_BYTES, "bytes", "an array of 65 536 holds"),
    Limit("data: header", DATA_HEADER_BYTES, "bytes", "columns of an example and a chat prompt; texts are in a frame"),
    Limit("data: frame", DATA_FRAME_BYTES, "bytes", "16.7 million tokens, or the texts of a group"),
    Limit(
        "frames of a message",
        FRAMES,
        "frames",
        "the largest kind of message has 17, its images at most 17, and a batch's experts 256",
    ),
    Limit("message", MESSAGE_BYTES, "bytes", "seven arrays of 16.7 million tokens"),
    Limit("batch of a rank", BATCH_BYTES, "bytes", "818 million tokens; above 64 MiB in parts of 32 MiB"),
    Limit("images of a prompt", IMAGES, "images", "environments[].images.max_images is lower"),
    Limit("images of a group", GROUP_IMAGES, "images", "16 in each of 64 trajectories with an environment"),
    Limit("bytes of a group's images", IMAGES_BYTES, "bytes", "half of a message"),
    Limit("pixels of an image", IMAGE_PIXELS, "pixels", "Pillow's limit; environments[].images.max_pixels is lower"),
    Limit("control: message", CONTROL_MESSAGE_BYTES, "bytes", "a header and its arrays"),
    Limit("control: unfinished", CONTROL_UNFINISHED_BYTES, "bytes", "of one connection, without one whole message"),
    Limit("control: all unfinished", CONTROL_UNFINISHED_TOTAL_BYTES, "bytes", "of all connections of the socket"),
    Limit("data: unfinished", DATA_UNFINISHED_BYTES, "bytes", "of one connection, without one whole message"),
    Limit("data: all unfinished", DATA_UNFINISHED_TOTAL_BYTES, "bytes", "of all connections of a socket"),
    Limit("items of a list in a header", LIST_ITEMS, "items", "peers, tickets, completions of a group"),
    Limit("keys of a map in a header", MAP_ITEMS, "keys", "values of a report, columns of an example"),
    Limit("lists and maps in a header", CONTAINERS, "values", "each takes 60 to 300 bytes of memory for 1 byte sent"),
    Limit("completions: body", HTTP_BODY_BYTES, "bytes", "two million token ids as JSON"),
    Limit("completions: body with images", HTTP_IMAGES_BODY_BYTES, "bytes", "a body, and the images of a group"),
    Limit("completions: prompts", HTTP_PROMPTS, "prompts", "of one request; more are refused with 400"),
    Limit("completions: choices", HTTP_CHOICES, "choices", "prompts × n of one request"),
    Limit("completions: stop", HTTP_STOPS, "texts", "of at most 1000 characters each, and as many token ids"),
    Limit("completions: logit_bias", HTTP_LOGIT_BIAS, "tokens", "of one request"),
    Limit("completions: tools", HTTP_TOOLS, "tools", "of one request, and as many calls in a message"),
    Limit("sessions: large requests", HTTP_LARGE_REQUESTS, "requests", "of one trajectory at a time, above 256 KiB"),
    Limit("sessions: requests with images", HTTP_IMAGE_REQUESTS, "requests", "the same, with more bytes than any text"),
    Limit("completions: connections", HTTP_CONNECTIONS, "idle ones", "beyond it the oldest are closed"),
    Limit(
        "completions: head", int(HTTP_CONNECTION_SECONDS), "seconds", "without a request; bodies have request_timeout"
    ),
    Limit("metrics: connections", HTTP_METRICS_CONNECTIONS, "threads", "beyond it the oldest is closed"),
    Limit("metrics: a connection", int(HTTP_CONNECTION_SECONDS), "seconds", "30 s between two bytes"),
    Limit("descriptors", DESCRIPTORS, "", "the soft limit of each actor is raised to the hard one, and to this"),
    Limit("name of a peer", NAME_BYTES, "bytes", "ZeroMQ identities end at 255, and the boot id is part of one"),
    Limit(
        "reports in a heartbeat",
        HEARTBEAT_REPORTS,
        "reports",
        "the oldest; others wait in the trainer and its checkpoints",
    ),
    Limit("bytes of reports in a heartbeat", HEARTBEAT_REPORT_BYTES, "bytes", "half of a control header"),
    Limit(
        "failures in a heartbeat",
        HEARTBEAT_FAILURES,
        "failures",
        "the oldest; others wait until the packer has taken these",
    ),
    Limit("load in a directive", LOAD_SHOWN, "", "of an engine or reward actor; a larger one is shown as this one"),
    Limit("policies in a directive", POLICIES_SHOWN, "policies", "the newest; engines with older ones get no requests"),
    Limit("notes in a heartbeat", HEARTBEAT_NOTES, "notes", "one for each reward function that screens name"),
    Limit(
        "tickets in a directive",
        DIRECTIVE_TICKETS,
        "tickets",
        "223 bytes each; others follow when a heartbeat names these",
    ),
    Limit("actors on a screen", ACTORS_SHOWN, "actors", "200 bytes each; beyond it the longest silent are shown"),
    Limit("address of a peer", ADDRESS_BYTES, "bytes", "a URL, a socket with its key, or the path of a folder"),
    Limit("words of a failure", DETAIL_CHARACTERS, "characters", "longer ones are cut"),
    Limit("reason of an end", REASON_CHARACTERS, "characters", "longer ones are cut"),
)


def cut(text: str, most: int = DETAIL_CHARACTERS) -> str:
    """Return the text, cut to `most` characters with `…` as the last; by default the limit of a failure's detail."""
    return text if len(text) <= most else text[: most - 1] + "…"


def cut_reason(text: str) -> str:
    """Return the reason why a run or a process ends, cut to REASON_CHARACTERS."""
    return cut(text, REASON_CHARACTERS)


def describe() -> str:
    """Return the table as aligned lines of text, one per limit."""
    width = max(len(limit.name) for limit in TABLE)
    amounts = []
    for limit in TABLE:
        amount = f"{limit.value} {limit.unit}".strip()
        if limit.unit == "bytes" and limit.value >= MIB and limit.value % MIB == 0:
            amount = f"{limit.value // MIB} MiB"
        elif limit.unit == "bytes" and limit.value >= 1024 and limit.value % 1024 == 0:
            amount = f"{limit.value // 1024} KiB"
        amounts.append(amount)
    widest = max(map(len, amounts))
    rows = zip(TABLE, amounts, strict=True)
    return "\n".join(f"{limit.name.ljust(width)}  {amount.rjust(widest)}  {limit.why}" for limit, amount in rows)
