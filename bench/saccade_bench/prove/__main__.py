"""`saccade-prove`: the command line of this folder as a distribution of its own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from saccade_bench.prove.options import ProveError, ProveOptions
from saccade_bench.prove.run import TIMEOUT, ProvedServer, prove

POLICIES = ("mixed-up", "not-judged", "never")


def main() -> int:
    """Return 1 if images were mixed up (or, as told by --fail-on, if a case was not judged), 2 if
    the server cannot be asked, and else 0.
    """
    parser = argparse.ArgumentParser(
        prog="saccade-prove",
        description="Check whether an OpenAI-compatible server mixes up images.",
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", help="sent as Authorization: Bearer KEY")
    parser.add_argument("--extra-request-body", type=json.loads, default={}, help="a JSON object")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds per request")
    parser.add_argument("--cases", nargs="*", default=(), help="default: all")
    parser.add_argument("--images", type=int, default=600, help='images in the case "many"')
    parser.add_argument("--host", default="127.0.0.1", help="where the server fetches images")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cold-url", help="the same engine and model without any cache")
    parser.add_argument("--restart-command", default="", help="restarts the server")
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--fail-on", choices=POLICIES, default="mixed-up")
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    server = ProvedServer(args.base_url, args.model, headers, args.timeout, args.extra_request_body)
    options = ProveOptions(
        tuple(args.cases),
        args.images,
        args.host,
        args.seed,
        args.cold_url,
        args.restart_command,
        args.output_file,
    )
    try:
        proof = prove(server, options)
    except ProveError as error:
        print(error, file=sys.stderr)
        return 2
    if args.fail_on == "never":
        return 0
    unjudged = any(each.verdict == "not judged" for each in proof.findings.values())
    return int(
        bool(proof.mixed_up or proof.unlike_cold) or (args.fail_on == "not-judged" and unjudged)
    )


if __name__ == "__main__":
    sys.exit(main())
