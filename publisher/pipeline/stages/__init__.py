"""The stages, one module and one public function each; they never import each other."""
