// All curves of runs as one HTML page that needs nothing else: no network, no libraries.
//
//   DDP_RETURN_IF_ERROR(WriteFileAtomically("curves.html", PlotPage(runs, tags)));
//
// Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "tools/plot_runs.h"

namespace ddp::tools {

// A diagram per tag with a curve per run, drawn as SVG by the page's own script: legend, values
// under the pointer, logarithmic scale, smoothing; light or dark as the browser is set.
//
// The curves are JSON in the element "curves": {"runs": [{"name", "options"}], "tags": [{"tag",
// "curves": [{"run": index, "steps": […], "values": […]}]}]}, with null for values that are not
// finite. Of a curve of more than 2000 points these are the smallest and largest of equal sections.
std::string PlotPage(const std::vector<LoggedRun>& runs, const std::vector<std::string>& tags);

}  // namespace ddp::tools
