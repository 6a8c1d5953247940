"""The peak of what a step allocates, on a CPU (by the allocator's events in torch's profiler) and
on a GPU."""

import torch


def peak_bytes(step, device) -> int:
    """Bytes at the peak of the step's second run, beyond what was there before it."""
    if device.type == "cuda":
        # its thread may free what it held after the step's end
        with torch.autograd.set_multithreading_enabled(False):
            step()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = step()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak
    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = step()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return peak
