// Raised when a function changes its arguments or what it returns: Python must not call one that was built for others.

extern "C" int laconic_interface() { return 9; }
