"""The worker process of `LimitedBackend`: encode and decode with limits of processor time and memory.

The first input line is the tokenizer.json as a JSON string. Each further line is `[what, value, seconds]` and gets `[result, error]`. The
kernel ends the process beyond a limit.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys

LONGEST_ANSWER = 1 << 27  # characters


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    text = sys.stdin.readline()
    backend = None
    for line in sys.stdin:
        what, value, seconds = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit, hard = int(used.ru_utime + used.ru_stime) + 1 + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        result: list[int] | str | None = None
        cause = None
        try:
            if backend is None:
                import tokenizers

                backend = tokenizers.Tokenizer.from_str(json.loads(text))
                backend.no_truncation()
                backend.no_padding()
                backend.encode_special_tokens = True
            if what == "encode":
                result = backend.encode(value, add_special_tokens=False).ids
            else:
                result = backend.decode(value, skip_special_tokens=False)
            if result is not None and len(result) > LONGEST_ANSWER:
                result, cause = None, f"its result is longer than {LONGEST_ANSWER}"
        except BaseException as error:  # a panic of Rust is no `Exception`
            cause = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        sys.stdout.write(json.dumps([result, cause]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
