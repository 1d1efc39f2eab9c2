# test/summary.awk: counts what the logs of run_tests say (test/main.cu writes them), and compares the bits of their runs.
#
#   awk -F '\t' [-v quiet=1] -f test/summary.awk LOG...     the exit status is 0 if every test passed or was skipped, and
#   124, as timeout has it, if some were left out
#
# A log has one line for the start of a test, and one for its end: "passed|failed|skipped <bits>", tabs between. A test that
# started and did not end has crashed or hung. One that read nothing back has no bits. "left out": there was no time for it.
# quiet: without a line for each test that failed.
function fail(name, why) { if (!(name in failed)) { failed[name] = 1; if (!quiet) print "FAILED: " name " (" why ")" } }
FNR == 1 { finish(); run = FILENAME; sub(/.*\//, "", run); sub(/\.log$/, "", run) }
function finish() { if (running != "") fail(running, "ended " run ": a crash, or it hung"); running = "" }
$1 == "start" { running = $2; seen[$2] = 1; next }
$1 == "left out" { n_left_out++; next }
{
    running = ""
    if ($1 == "failed") { seen[$2] = 1; fail($2, run) }
    if ($1 == "skipped" && !($2 in skipped)) { skipped[$2] = 1; print "skipped: " $2 ": " $4 }
    if ($1 == "passed" && ($2 in bits) && bits[$2] != $3) fail($2, "its results differ in their bits: " bits_run[$2] ", " run)
    if ($1 == "passed" && !($2 in bits)) { bits[$2] = $3; bits_run[$2] = run }
}
END {
    finish()
    for (name in seen) if (name in failed) n_failed++; else if (name in skipped) n_skipped++; else n_passed++
    if (n_passed + n_failed == 0) { print "no test ran"; n_failed = 1 }
    printf "%d passed, %d failed%s%s\n", n_passed, n_failed, n_skipped ? ", " n_skipped " skipped" : "",
        n_left_out ? ", " n_left_out " left out: there was no time" : ""
    exit n_failed > 0 ? 1 : n_left_out > 0 ? 124 : 0
}
