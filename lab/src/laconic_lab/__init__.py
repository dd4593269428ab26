"""What trains, compares, reports and benches: they meet through records on disk, and the library needs none of them."""
