std = "luajit"
max_line_length = 120
self = false
exclude_files = { "build/", ".tidemill/" }

files["spec/"] = { std = "+busted" }
files["spec/support/"] = { std = "luajit" }
files["lua/tidemill/_meta/"] = { ignore = { "2..", "631" } }
files[".busted"] = { std = "luajit" }
files["template/spec/"] = { std = "+busted" }
