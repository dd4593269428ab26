// Raised when a function changes its arguments: Python must not call one that was built for others.

extern "C" int laconic_interface() { return 1; }
