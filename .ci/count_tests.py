#!/usr/bin/env python3
"""Counts what Bazel's tests did: count_tests.py BUILD_EVENT_JSON

Prints "passed failed skipped", in test cases: each test target's own test.xml
says which it ran; a target that wrote none, or that failed or timed out without
a failing case, counts as one. Names what failed or was skipped on stderr.
"""

import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def results(path):
    """Yields (label, passed, path of test.xml or None) of every test, last attempt only."""
    last = {}
    with open(path) as f:
        for line in f:
            event = json.loads(line)
            key = event["id"].get("testResult")
            if not key or "testResult" not in event:
                continue
            result = event["testResult"]
            xml = [
                urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
                for output in result.get("testActionOutput", [])
                if output["name"] == "test.xml"
            ]
            part = (key["label"], key.get("run"), key.get("shard"))
            last[part] = (key["label"], result["status"] == "PASSED", xml[0] if xml else None)
    return last.values()


def cases(path):
    """Yields (name, "passed" | "failed" | "skipped") of each case of one test.xml."""
    for case in ElementTree.parse(path).iter("testcase"):
        name = "%s.%s" % (case.get("classname", ""), case.get("name", ""))
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        elif case.find("skipped") is not None or case.get("result") in ("skipped", "suppressed"):
            yield name, "skipped"
        else:
            yield name, "passed"


def count(path):
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for label, passed, xml in results(path):
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
    counted = count(sys.argv[1])
    print(counted["passed"], counted["failed"], counted["skipped"])
