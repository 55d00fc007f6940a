#!/usr/bin/env python3
"""Counts what Bazel's tests did: count_tests.py BUILD_EVENT_JSON...

Prints "passed failed skipped", in test cases: each test target's own test.xml
says which it ran; a target that wrote none, or that failed or timed out without
a failing case, counts as one. Names what failed or was skipped on stderr. Of a
target that several files have, the last one counts.

    count_tests.py --repeatable BUILD_EVENT_JSON

Prints the failed targets that may be repeated (may_repeat below), a line each:
its label, a tab, its first error.

    count_tests.py --repeatable_output FILE

The same for the output of one check: prints its first error, or exits with 1 if
it may not be repeated.
"""

import json
import re
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

# What repeating would hide. Each of these is a defect even if it is seen once in a hundred runs.
_NEVER_REPEATED = re.compile(
    r"""
    (Address|Leak|Memory|Thread|UndefinedBehavior)Sanitizer     # sanitizers
    | :\ runtime\ error:
    | [Ff]uzz | \b[Cc]ounterexample\b                            # fuzzers, model checkers
    # Death by a signal, of a test or of a process that it has started.
    | [Ss]egmentation\ fault | \b(core\ dumped|Aborted|Killed)\b | \bSIG(SEGV|ABRT|BUS|FPE|ILL)\b
    | [Ss]ignal\ \d+ | terminate\ called | Check\ failed: | double\ free | corrupted | unaligned\ tcache
    | AssertionError:\ -\d+\ !=\ \d | returncode=-\d | Signals\.SIG
    | [Bb]us\ error | [Ff]loating\ point\ exception | [Ii]llegal\ instruction
    # Of a shell: 128 and SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV.
    | (status|code)[:=]?\ (13[24569]|-\d+)\b
    # Bits or values that differ: googletest, unittest, torch, diff, and the words of our own tests.
    | Expected\ equality\ of\ these\ values(?!:\n\s*[^\n]*\b(code|status|exit|WEXITSTATUS))
    | Expected:\ \((?![^\n]*\b(code|status|exit|WEXITSTATUS))[^\n]*\)\ [!=]=\ \(
    | \bbits\b[^\n]*\bnot\b | The\ difference\ between | \b(at::)?equal\( | \ballclose\b | Tensor-likes
    | AssertionError:\ (?!-?\d{1,3}\ !=\ 0\b)[^\n]*\ !=\  | Lists\ differ | Mismatched\ elements
    | \bdiffers?\b | \bmismatch
    """,
    re.VERBOSE,
)
_FIRST_ERROR = re.compile(
    r"^.*(Failure$|FAILED|FAIL:|Error|error:|[Tt]imed out|TIMEOUT|[Ff]ailed).*$", re.MULTILINE
)


def without_passed_cases(output):
    """`output` without what googletest's cases printed that passed: they may test deaths and differences."""
    kept, case = [], []
    for line in output.splitlines():
        if line.startswith("[ RUN      ]"):
            kept += case
            case = [line]
        elif line.startswith(("[       OK ]", "[  SKIPPED ]")):
            case = []
        elif case:
            case.append(line)
        else:
            kept.append(line)
    return "\n".join(kept + case)


def may_repeat(output):
    """Whether a failure with this output may be one of the machine, or of a peer, which passes next time."""
    return not _NEVER_REPEATED.search(without_passed_cases(output))


def first_error(output):
    """The first line of `output` that says what failed; with googletest's, also the next."""
    output = without_passed_cases(output)
    found = _FIRST_ERROR.search(output)
    if not found:
        return (output.strip().splitlines() or ["no output"])[-1].strip()
    line = found.group().strip()
    if line.endswith("Failure"):
        line += " " + output[found.end() :].strip().splitlines()[0]
    return line[:300]


def results(*paths):
    """Yields (label, passed, path of test.xml or None, path of test.log or None) of every test.

    Of several attempts, or of one test in several files, only the last.
    """
    last = {}
    for path in paths:
        with open(path) as f:
            for line in f:
                event = json.loads(line)
                key = event["id"].get("testResult")
                if not key or "testResult" not in event:
                    continue
                result = event["testResult"]
                files = {
                    output["name"]: urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
                    for output in result.get("testActionOutput", [])
                    if "uri" in output
                }
                part = (key["label"], key.get("run"), key.get("shard"))
                passed = result["status"] == "PASSED"
                last[part] = (key["label"], passed, files.get("test.xml"), files.get("test.log"))
    return last.values()


def repeatable(path):
    """Yields (label, first error) of each target that failed and may be repeated."""
    logs = {}
    for label, passed, _, log in results(path):
        if passed:
            continue
        try:
            with open(log, errors="replace") as f:
                text = f.read()
        except (OSError, TypeError):
            text = "no log"
        logs.setdefault(label, []).append(text)
    for label, texts in logs.items():
        if "fuzz" not in label and all(map(may_repeat, texts)):
            yield label, first_error(texts[0])


def cases(path):
    """Yields (name, "passed" | "failed" | "skipped") of each case of one test.xml; of one that was
    skipped, the name with the reason."""
    for case in ElementTree.parse(path).iter("testcase"):
        name = "%s.%s" % (case.get("classname", ""), case.get("name", ""))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        elif skipped is not None or case.get("result") in ("skipped", "suppressed"):
            # googletest's has the place in a line before.
            reason = "" if skipped is None else skipped.get("message", "").strip()
            yield "%s: %s" % (name, reason.splitlines()[-1]) if reason else name, "skipped"
        else:
            yield name, "passed"


def count(*paths):
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for label, passed, xml, _ in results(*paths):
        try:
            found = list(cases(xml)) if xml else []
        except (OSError, ElementTree.ParseError):
            found = []
        if not passed and not any(outcome == "failed" for _, outcome in found):
            found.append(("(as a whole: it crashed or timed out)", "failed"))
        for name, outcome in found or [("(as a whole)", "passed")]:
            total[outcome] += 1
            if outcome != "passed":
                print("%s %s %s" % (outcome, label, name), file=sys.stderr)
    return total


if __name__ == "__main__":
    if sys.argv[1] == "--repeatable":
        for label, error in repeatable(sys.argv[2]):
            print("%s\t%s" % (label, error))
    elif sys.argv[1] == "--repeatable_output":
        # Of a check that is no test of Bazel's: prints the first error, or fails.
        with open(sys.argv[2], errors="replace") as f:
            output = f.read()
        if not may_repeat(output):
            sys.exit(1)
        print(first_error(output))
    else:
        counted = count(*sys.argv[1:])
        print(counted["passed"], counted["failed"], counted["skipped"])
