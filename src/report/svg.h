#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// The width and height of a drawing, and the page layouts that show it. Text is not scaled with the page, so each
/// drawing is made once for each layout.
struct DrawingSize {
  const char* layout;  ///< class: "wide", "middle" or "narrow"
  double width;
  double height;
};

/// One drawing being made. Colours and fonts come from the page's style, by class.
class Svg {
 public:
  /// `label` is for screen readers; `attributes` go into the tag unchanged.
  Svg(const DrawingSize& size, std::string_view label, std::string_view attributes = "");

  void line(std::string_view css, double x1, double y1, double x2, double y2);
  void rect(std::string_view css, double x, double y, double width, double height, std::string_view tooltip = "");
  void circle(std::string_view css, double x, double y, double radius);
  /// `anchor`: start, middle or end.
  void text(std::string_view css, double x, double y, std::string_view anchor, std::string_view content);
  /// Appended unchanged.
  void raw(std::string_view markup) { out_ += markup; }

  std::string finish() { return std::move(out_) + "</svg>"; }

 private:
  std::string out_;
};

/// The greatest width of a text at the page's small size; a narrower font leaves room.
double text_width(std::string_view text);
/// The text, or its beginning and an ellipsis, no wider than `width`.
std::string fitted(std::string_view text, double width);

}  // namespace lockstep
