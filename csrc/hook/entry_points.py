"""Reads csrc/hook/entry_points.txt, the table of the driver's entry points, and compares it with CUDA's headers.

    python entry_points.py check DIRECTORY
    python entry_points.py symbols

The first prints the lines that the table lacks for the headers in DIRECTORY (cuda.h, cudaTypedefs.h and those beside
them), and the arguments that these have in another place, and exits with 1 if there are any; the second prints the
symbols that the shim exports. trampolines.py generates the shim's entry points and the engine's table from the same
file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TREATMENTS = ("defer", "gate", "drain", "direct")
SCOPES = (
    "-",
    "stream",
    "event",
    "stream+event",
    "events",
    "context",
    "memory",
    "context+memory",
    "peers",
    "exec",
    "graph",
    "process",
)
TWINS = ("-", "ptsz", "ptds")
#: What an argument can be, and its type in CUDA's headers.
TYPES = {
    "stream": ("CUstream",),
    "event": ("CUevent",),
    "other": ("CUevent", "CUcontext"),
    "function": ("CUfunction",),
    "kernel": ("CUkernel",),
    "exec": ("CUgraphExec",),
    "context": ("CUcontext",),
    "memory": ("CUdeviceptr_v1", "CUdeviceptr_v2"),
}
ROLES = tuple(TYPES)
#: What a call does to what the engine knows: of handles, captures, memory and completion. A word is read by the guards
#: (offload.cpp), by a rule of _check() or by a test that asks every line that has it.
MEANINGS = (
    "-",
    "launch",
    "synchronise",
    "query-stream",
    "query-event",
    "begin-capture",
    "end-capture",
    "destroy-stream",
    "create-event",
    "share-event",
    "destroy-event",
    "destroy-context",
    "instantiate",
    "change-exec",
    "destroy-exec",
    "set-function",
    "set-kernel",
    "set-functions",
    "allocate",
    "free",
    "peer-access",
    "pool-access",
    "names-memory",
    "pins-memory",
)
#: What a guard cannot do, as it runs before the driver's function and knows no signature.
NEED_HOOK = ("launch", "create-event", "destroy-event", "instantiate", "allocate")
#: What ends something that queued work of any stream may use: unless it has its own place in the ring (defer), it waits
#: for every stream of the devices that can use it.
ENDS = ("free", "destroy-context")
SCOPES_OF_ENDS = ("memory", "process")
#: What a scope or a meaning cannot do without.
NEEDED_BY_SCOPE = {"stream": ("stream",), "event": ("event",), "stream+event": ("stream", "event")} | {
    "events": ("event", "other"),
    "memory": ("memory",),
    "context+memory": ("memory",),
    "peers": ("context", "other"),
    "exec": ("exec",),
}
NEEDED_BY_MEANING = {
    "query-stream": ("stream",),
    "destroy-stream": ("stream",),
    "begin-capture": ("stream",),
    "query-event": ("event",),
    "share-event": ("event",),
    "peer-access": ("context",),
    "set-function": ("function",),
    "set-kernel": ("kernel",),
    "change-exec": ("exec",),
    "destroy-exec": ("exec",),
}
#: Arguments, in registers and on the stack, that a guard can read.
LARGEST_ARGUMENT = 15

NAME = re.compile(r"cu[A-Z][A-Za-z0-9_]*")
COLUMNS = ("symbol", "since", "twin", "treatment", "scope", "arguments", "meaning", "by")
TYPEDEF = re.compile(r"typedef\s+\w+\s*\(CUDAAPI\s*\*\s*PFN_(cu\w+?)_v(\d+)(?:_(pt[sd][zs]))?\)\s*\(([^;]*)\)\s*;")
DECLARATION = re.compile(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\([^;{]*\)\s*;")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class TableError(Exception):
    """The table is malformed; the message names file and line."""


@dataclass(frozen=True)
class EntryPoint:
    """One version of a driver function: a line of the table."""

    symbol: str
    since: int  # 0: the headers do not say
    alias: str  # another name that means it, "" if none,
    alias_since: int  # from this CUDA version on
    twin: str  # "" if none
    treatment: str
    scope: str
    arguments: Mapping[str, int]
    meaning: str
    taken_over: bool

    @property
    def name(self) -> str:
        """As cuGetProcAddress knows it."""
        return re.sub(r"_v\d+$", "", self.symbol)

    def exported(self) -> Iterator[str]:
        """The symbols that a library exports for it."""
        yield self.symbol
        if self.twin:
            yield f"{self.symbol}_{self.twin}"


def read(path: Path) -> list[EntryPoint]:
    """Returns the table, sorted by symbol.

    Raises:
        TableError: A line is malformed.
    """
    found: dict[str, EntryPoint] = {}
    lines: dict[str, int] = {}
    explained = False
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        where = f"{path}:{number}"
        if line.startswith("#"):
            explained = True
            continue
        if not line.strip():
            explained = False
            continue
        if not explained:
            raise TableError(f"{where}: put a comment above it that says why these functions are treated so")
        point = _parse(line, where)
        for symbol in point.exported():
            if symbol in lines:
                raise TableError(f"{where}: {symbol} is on line {lines[symbol]} already; remove one")
            lines[symbol] = number
        found[point.symbol] = point
    if not found:
        raise TableError(f"{path}: no entry points; there must be at least one")
    _check_versions(found.values(), path, lines)
    return [found[symbol] for symbol in sorted(found)]


def _parse(line: str, where: str) -> EntryPoint:
    fields = line.split()
    if len(fields) != len(COLUMNS):
        raise TableError(f"{where}: {len(fields)} columns; there are {len(COLUMNS)}: {' '.join(COLUMNS)}")
    symbol, since, twin, treatment, scope, arguments, meaning, by = fields
    if not NAME.fullmatch(symbol) or re.search(r"_pt[sd][zs]$", symbol):
        raise TableError(f"{where}: {symbol!r} is no driver function's name; write one like cuMemFree_v2, twins apart")
    for column, value, known in (
        ("twin", twin, TWINS),
        ("treatment", treatment, TREATMENTS),
        ("scope", scope, SCOPES),
        ("meaning", meaning, MEANINGS),
        ("by", by, ("-", "hook")),
    ):
        if value not in known:
            raise TableError(f"{where}: {value!r} is no {column}; it is one of {' '.join(known)}")
    first, _, alias = since.partition(",")
    alias_name, _, alias_since = alias.partition("@")
    if not re.fullmatch(r"-|\d{4,5}", first) or (alias and not re.fullmatch(r"cu[A-Z]\w*@\d{4,5}", alias)):
        raise TableError(f"{where}: since {since!r}: write a CUDA version like 12040, or 11040,cuOther@12000")
    places = {}
    for part in arguments.split(",") if arguments != "-" else ():
        role, _, place = part.partition("=")
        if role not in ROLES or not place.isdecimal() or int(place) > LARGEST_ARGUMENT or role in places:
            raise TableError(
                f"{where}: argument {part!r}: write ROLE=PLACE of {' '.join(ROLES)} and 0 to 15, each once"
            )
        places[role] = int(place)
    point = EntryPoint(
        symbol,
        0 if first == "-" else int(first),
        alias_name,
        int(alias_since or 0),
        "" if twin == "-" else twin,
        treatment,
        scope,
        places,
        meaning,
        by == "hook",
    )
    _check(point, where)
    return point


def _check(point: EntryPoint, where: str) -> None:
    if (point.treatment == "direct") != (point.scope == "-"):
        raise TableError(f"{where}: {point.symbol}: a direct function has no scope (-), and every other has one")
    if point.treatment == "direct" and point.arguments:
        raise TableError(f"{where}: {point.symbol}: nothing reads a direct function's arguments; write -")
    if point.treatment in ("defer", "gate") and not point.taken_over:
        raise TableError(f"{where}: {point.symbol}: {point.treatment} needs a function in csrc/hook (hook)")
    if (point.treatment == "gate") > (point.meaning == "launch"):
        raise TableError(f"{where}: {point.symbol}: only a launch waits at the gate")
    if point.meaning in NEED_HOOK and not point.taken_over:
        raise TableError(f"{where}: {point.symbol}: {point.meaning} needs a function in csrc/hook (hook)")
    if point.meaning == "begin-capture" and point.treatment != "drain":
        raise TableError(f"{where}: {point.symbol}: queued launches would be captured: begin-capture drains")
    if point.meaning in ENDS and point.treatment != "defer" and point.scope not in SCOPES_OF_ENDS:
        scopes = " or ".join(SCOPES_OF_ENDS)
        raise TableError(f"{where}: {point.symbol}: {point.meaning} drains for {scopes}, or is deferred")
    needed = list(NEEDED_BY_MEANING.get(point.meaning, ()))
    if not point.taken_over:  # else the function knows
        needed += NEEDED_BY_SCOPE.get(point.scope, ())
    if point.treatment != "defer":
        for role in needed:
            if role not in point.arguments:
                raise TableError(f"{where}: {point.symbol}: which argument is the {role}? (arguments)")


def _check_versions(points: Iterable[EntryPoint], path: Path, lines: Mapping[str, int]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for point in points:
        for key in ((point.name, point.since), (point.alias, point.alias_since)):
            if key[1] != 0 and key in seen:
                raise TableError(
                    f"{path}:{lines[point.symbol]}: {key[0]} means {seen[key]} and {point.symbol} from {key[1]} on; "
                    "look the version up in cudaTypedefs.h"
                )
            seen[key] = point.symbol


# ---- comparison with headers


@dataclass(frozen=True)
class Headers:
    """What headers declare: functions, and the versions that names have."""

    declared: frozenset[str]
    versions: Mapping[tuple[str, int], str]  # (name, CUDA version) -> arguments
    twins: Mapping[str, str]  # name -> suffix


def read_headers(directory: Path) -> Headers:
    """Reads cuda*.h in a directory.

    Raises:
        TableError: There is no cuda.h or cudaTypedefs.h.
    """
    for name in ("cuda.h", "cudaTypedefs.h"):
        if not (directory / name).is_file():
            raise TableError(f"{directory} has no {name}; give the include directory of CUDA's runtime wheel")
    declared: set[str] = set()
    versions: dict[tuple[str, int], str] = {}
    twins: dict[str, str] = {}
    for path in sorted(directory.glob("cuda*.h")):
        text = COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace"))
        if path.name.endswith("Typedefs.h"):
            for name, version, twin, arguments in TYPEDEF.findall(text):
                if twin:
                    twins[name] = twin
                else:
                    versions[name, int(version)] = " ".join(arguments.split())
        elif path.name in ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaProfiler.h", "cudaVDPAU.h"):
            declared.update(DECLARATION.findall(text))
    return Headers(frozenset(declared), versions, twins)


def missing(points: list[EntryPoint], headers: Headers) -> list[str]:
    """The lines to add to the table, with the treatment that is always safe."""
    listed = {symbol for point in points for symbol in point.exported()}
    known = {(point.name, point.since) for point in points} | {(point.alias, point.alias_since) for point in points}
    without_version = {point.name for point in points if point.since == 0}
    newest = {point.name: point.symbol for point in sorted(points, key=lambda each: each.since)}
    lines = []
    told = set()
    for (name, version), arguments in sorted(headers.versions.items()):
        if (name, version) in known or name in without_version:
            continue
        symbol = name
        if name in newest:
            last = re.search(r"_v(\d+)$", newest[name])
            symbol = f"{name}_v{int(last[1]) + 1 if last else 2}"
        newest[name] = symbol
        told.add(symbol)
        twin = headers.twins.get(name, "-")
        stream = _stream(arguments)
        where = f"stream stream={stream}" if stream is not None and twin != "-" else "process -"
        lines.append(f"{symbol} {version} {twin} drain {where} - -")
    for symbol in sorted(headers.declared - listed - told):
        if not re.search(r"_pt[sd][zs]$", symbol):
            lines.append(f"{symbol} - - drain process - - -")
    return lines


def misplaced(points: list[EntryPoint], headers: Headers) -> list[str]:
    """The arguments that the headers have elsewhere, a line each."""
    lines = []
    for point in points:
        declared = headers.versions.get((point.name, point.since))
        if declared is None:
            continue
        types = [_type(argument) for argument in declared.split(",")]
        for role, place in point.arguments.items():
            here = types[place] if place < len(types) else "nothing"
            if here not in TYPES[role]:
                lines.append(f"{point.symbol} {role}={place}: that is {here}")
    return lines


def _type(argument: str) -> str:
    """Of `CUstream hStream` "CUstream"."""
    words = argument.replace("const ", "").split()
    return "".join(words[:-1]) if len(words) > 1 else "".join(words)


def _stream(arguments: str) -> int | None:
    for place, argument in enumerate(arguments.split(",")):
        if re.match(r"\s*CUstream\s", argument):
            return place
    return None


def main(arguments: list[str]) -> int:
    """Runs a command; returns the process's exit code."""
    table = Path(__file__).with_name("entry_points.txt")
    try:
        points = read(table)
        match arguments:
            case ["symbols"]:
                print("\n".join(sorted(symbol for point in points for symbol in point.exported())))
                return 0
            case ["check", directory]:
                headers = read_headers(Path(directory))
                lines = missing(points, headers)
                wrong = misplaced(points, headers)
            case _:
                print("usage: entry_points.py check DIRECTORY | symbols", file=sys.stderr)
                return 2
    except (TableError, OSError, UnicodeDecodeError) as error:
        print(f"entry_points.py: error: {error}", file=sys.stderr)
        return 2
    if lines:
        print("\n".join(lines))
        print(f"{table} lacks these lines; give each the treatment that it needs (docs/order.md)", file=sys.stderr)
    if wrong:
        print("\n".join(wrong))
        print(f"{table} has these arguments where the headers have others", file=sys.stderr)
    return 1 if lines or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
